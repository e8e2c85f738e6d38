"""What comes with the loss: aux, random keys and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum.jax
from tests.jax.problems import at_once, in_micro_batches, network, outputs, rows, squared_error, tree_error
from tests.reference import FLOAT64


def with_aux(params, batch):
    x, y = batch
    errors = ((outputs(params, x) - y) ** 2).sum(-1)
    return errors.mean(), {
        "rows": {"error": errors, "outputs": outputs(params, x)},
        "right": (errors < 5).sum(),
        "counted": (errors < 5).sum(dtype=jnp.int32),
        "mean": errors.mean(),
        "size": jnp.asarray(len(x)),
        "none": None,
    }


HOWS = {"rows": "concat", "right": "sum", "counted": "sum", "mean": "mean", "size": "last", "none": "concat"}


@pytest.mark.parametrize("size", [4, pytest.param(3, marks=pytest.mark.slow), 11])
def test_aux_is_the_large_batches(size):
    params, batch = network(), rows(11)
    split = in_micro_batches(with_aux, size, has_aux=True, aux=HOWS)
    (loss, aux), grads = split(params, batch)
    (expected_loss, expected), expected_grads = at_once(with_aux, has_aux=True)(params, batch)
    expected["size"] = {4: 3, 3: 2, 11: 11}[size]  # 4, 4, 3 and 3, 3, 3, 2
    assert tree_error(((loss, aux), grads), ((expected_loss, expected), expected_grads)) <= FLOAT64
    assert aux["right"].dtype == expected["right"].dtype
    assert aux["counted"].dtype == expected["counted"].dtype == jnp.int32


def test_aux_of_grad_and_one_word_for_all():
    def loss_fn(params, batch):
        return squared_error(params, batch), (batch[0][:, 0] > 0, batch[1])

    params, batch = network(), rows(11)
    _, aux = jax.jit(gradaccum.jax.grad(loss_fn, micro_batch_size=4, has_aux=True))(params, batch)
    assert (aux[0] == (batch[0][:, 0] > 0)).all()
    assert (aux[1] == batch[1]).all()


def test_means_in_the_aux_are_weighed_as_the_loss():
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0])
    mask = jnp.asarray([True, False, False, False, True])

    def loss_fn(w, batch):
        x, mask = batch
        return (w * x * mask).sum() / mask.sum(), {"mean": (x * mask).sum() / mask.sum(), "right": mask.any()}

    split = in_micro_batches(
        loss_fn, 2, has_aux=True, aux={"mean": "mean", "right": "sum"}, weight=lambda b: b[1].sum()
    )
    (loss, aux), gradient = split(1.0, (x, mask))
    assert float(loss) == float(gradient) == float(aux["mean"]) == 3.0
    assert int(aux["right"]) == 2


def test_means_in_the_aux_of_a_summed_loss_are_weighed_by_rows():
    def loss_fn(w, x):
        return (w * x).sum(), x.mean()

    split = in_micro_batches(loss_fn, 2, reduction="sum", has_aux=True, aux="mean")
    (loss, mean), _ = split(1.0, jnp.arange(5.0))
    assert (float(loss), float(mean)) == (10.0, 2.0)


def dropped(params, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key["drop"], 0.5, x.shape)
    return ((outputs(params, jnp.where(keep, x, 0)) - y) ** 2).mean()


@pytest.mark.parametrize(
    "key",
    [
        jax.random.key(3),
        pytest.param(jax.random.PRNGKey(3), marks=pytest.mark.slow),
        pytest.param(jax.random.key(3, impl="rbg"), marks=pytest.mark.slow),
    ],
)
def test_a_key_is_split_for_each_micro_batch(key):
    params, (x, y) = network(), rows(11)
    split = in_micro_batches(dropped, 4, rng_argnum=2)
    found = split(params, (x, y), {"drop": key})
    sizes, keys = (4, 4, 3), jax.random.split(key, 3)
    keep = jnp.concatenate([jax.random.bernoulli(k, 0.5, (n, 5)) for k, n in zip(keys, sizes, strict=True)])

    def whole(params):
        return ((outputs(params, jnp.where(keep, x, 0)) - y) ** 2).mean()

    assert tree_error(found, at_once(whole)(params)) <= FLOAT64
    assert tree_error(split(params, (x, y), {"drop": key}), found) == 0


def test_a_single_micro_batch_gets_the_key_itself():
    args = network(), rows(4), {"drop": jax.random.key(1)}
    split = in_micro_batches(dropped, 4, rng_argnum=2)
    assert tree_error(split(*args), at_once(dropped)(*args)) == 0


def moving(params, batch, state):
    x, y = batch
    state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "updates": state["updates"] + 1}
    return ((outputs(params, x - state["mean"]) - y) ** 2).mean(), state


def by_hand(params, batch, state, sizes):
    """A plain loop: the gradients of each micro-batch, weighed by rows, and the state that goes on."""
    total, grads, start = 0.0, jax.tree.map(jnp.zeros_like, params), 0
    for size in sizes:
        micro = jax.tree.map(lambda leaf: leaf[start : start + size], batch)  # noqa: B023  # used at once
        (loss, state), g = at_once(moving, has_aux=True)(params, micro, state)
        total += loss * size / sum(sizes)
        grads = jax.tree.map(lambda a, b: a + b * size / sum(sizes), grads, g)  # noqa: B023
        start += size
    return (total, state), grads


def test_state_goes_from_micro_batch_to_micro_batch():
    params, batch, state = network(), rows(11), {"mean": jnp.zeros(5), "updates": 0}
    split = in_micro_batches(moving, 4, state_argnum=2)
    assert tree_error(split(params, batch, state), by_hand(params, batch, state, [4, 4, 3])) <= FLOAT64
    one = in_micro_batches(moving, 11, state_argnum=2)(params, batch, state)
    assert tree_error(one, by_hand(params, batch, state, [11])) <= FLOAT64


def test_state_and_aux_come_with_the_loss_together():
    def loss_fn(params, batch, state):
        loss, state = moving(params, batch, state)
        return loss, (state, batch[0])

    params, batch, state = network(), rows(11), {"mean": jnp.zeros(5), "updates": 0}
    split = in_micro_batches(loss_fn, 4, state_argnum=2, has_aux=True)
    (loss, (state_found, aux)), grads = split(params, batch, state)
    (expected, expected_state), expected_grads = by_hand(params, batch, state, [4, 4, 3])
    assert tree_error((loss, state_found, grads), (expected, expected_state, expected_grads)) <= FLOAT64
    assert (aux == batch[0]).all()
    again = gradaccum.jax.grad(loss_fn, micro_batch_size=4, state_argnum=2, has_aux=True)
    grads_again, second = jax.jit(again)(params, batch, state)
    assert tree_error((grads_again, second), (grads, (state_found, aux))) <= FLOAT64


def test_statistics_pooled_over_the_batch_are_an_aux():
    """The words of the other shells: `micro` is `state_argnum`, `frozen` is to ignore it, `pooled` is this."""

    def loss_fn(params, batch, mean):
        loss, state = moving(params, batch, {"mean": mean, "updates": 0})
        return squared_error(params, batch) + 0 * loss, state["mean"]

    params, batch = network(), rows(11)
    split = in_micro_batches(loss_fn, 4, has_aux=True, aux="mean")
    (_, mean), _ = split(params, batch, jnp.ones(5))
    np.testing.assert_allclose(mean, 0.9 + 0.1 * batch[0].mean(0), rtol=1e-12)
