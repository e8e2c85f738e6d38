"""What comes with the loss: aux, random keys and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum.jax
from tests.jax.problems import (
    BATCH,
    PARAMS,
    assert_same,
    at_once,
    errors,
    in_micro_batches,
    outputs,
    rows,
    squared_error,
    taken,
)


def with_aux(params, batch):
    of_rows = errors(params, *batch)
    return of_rows.mean(), {
        "rows": {"error": of_rows, "outputs": outputs(params, batch[0])},
        "right": (of_rows < 5).sum(),
        "counted": (of_rows < 5).sum(dtype=jnp.int32),
        "mean": of_rows.mean(),
        "size": jnp.asarray(len(batch[0])),
        "none": None,
    }


HOWS = {"rows": "concat", "right": "sum", "counted": "sum", "mean": "mean", "size": "last", "none": "concat"}


@pytest.mark.parametrize(("size", "last"), [(4, 3), pytest.param(3, 2, marks=pytest.mark.slow), (11, 11)])
def test_aux_is_the_large_batches(size, last):
    (loss, aux), grads = in_micro_batches(with_aux, size, has_aux=True, aux=HOWS)(PARAMS, BATCH)
    (expected_loss, expected), expected_grads = at_once(with_aux, has_aux=True)(PARAMS, BATCH)
    expected["size"] = last
    assert_same(((loss, aux), grads), ((expected_loss, expected), expected_grads))
    assert aux["right"].dtype == expected["right"].dtype
    assert aux["counted"].dtype == expected["counted"].dtype == jnp.int32


def test_aux_of_grad_and_one_word_for_all():
    def loss_fn(params, batch):
        return squared_error(params, batch), (batch[0][:, 0] > 0, batch[1])

    _, aux = jax.jit(gradaccum.jax.grad(loss_fn, micro_batch_size=4, has_aux=True))(PARAMS, BATCH)
    assert_same(aux, (BATCH[0][:, 0] > 0, BATCH[1]), 0)


def counted_mean(w, batch):
    x, mask = batch
    return (w * x * mask).sum() / mask.sum(), {"mean": (x * mask).sum() / mask.sum(), "right": mask.any()}


COUNTED = {"aux": {"mean": "mean", "right": "sum"}, "weight": lambda b: b[1].sum()}
TWO_OF_FIVE = jnp.arange(1.0, 6.0), jnp.asarray([True, False, False, False, True])


@pytest.mark.parametrize(
    ("loss_fn", "batch", "options", "expected"),
    [
        (counted_mean, TWO_OF_FIVE, COUNTED, (3.0, {"mean": 3.0, "right": 2})),
        (lambda w, x: ((w * x).sum(), x.mean()), jnp.arange(5.0), {"reduction": "sum", "aux": "mean"}, (10.0, 2.0)),
    ],
    ids=["as the loss", "by rows, for a summed loss"],
)
def test_means_in_the_aux_are_weighed(loss_fn, batch, options, expected):
    found, gradient = in_micro_batches(loss_fn, 2, has_aux=True, **options)(1.0, batch)
    assert_same((found, gradient), (expected, expected[0]), 0)


def dropped(params, batch, key):
    x, y = batch
    return ((outputs(params, jnp.where(jax.random.bernoulli(key["drop"], 0.5, x.shape), x, 0)) - y) ** 2).mean()


@pytest.mark.parametrize(
    "key",
    [
        jax.random.key(3),
        pytest.param(jax.random.PRNGKey(3), marks=pytest.mark.slow),
        pytest.param(jax.random.key(3, impl="rbg"), marks=pytest.mark.slow),
    ],
)
def test_a_key_is_split_for_each_micro_batch(key):
    split = in_micro_batches(dropped, 4, rng_argnum=2)
    found = split(PARAMS, BATCH, {"drop": key})
    keys = zip(jax.random.split(key, 3), (4, 4, 3), strict=True)
    keep = jnp.concatenate([jax.random.bernoulli(k, 0.5, (n, 5)) for k, n in keys])

    def whole(params, x, y):
        return ((outputs(params, jnp.where(keep, x, 0)) - y) ** 2).mean()

    assert_same(found, at_once(whole)(PARAMS, *BATCH))
    assert_same(split(PARAMS, BATCH, {"drop": key}), found, 0)


def test_a_single_micro_batch_gets_the_key_itself():
    args = PARAMS, rows(4), {"drop": jax.random.key(1)}
    assert_same(in_micro_batches(dropped, 4, rng_argnum=2)(*args), at_once(dropped)(*args), 0)


STATE = {"mean": jnp.zeros(5), "updates": 0}


def moving(params, batch, state):
    x, y = batch
    state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "updates": state["updates"] + 1}
    return ((outputs(params, x - state["mean"]) - y) ** 2).mean(), state


def by_hand(sizes):
    """A plain loop: the gradients of each micro-batch, weighed by rows, and the state that goes on."""
    total, grads, start, state = 0.0, jax.tree.map(jnp.zeros_like, PARAMS), 0, STATE
    for size in sizes:
        (loss, state), g = at_once(moving, has_aux=True)(PARAMS, taken(BATCH, start, start + size), state)
        total += loss * size / sum(sizes)
        grads = jax.tree.map(lambda a, b: a + b * size / sum(sizes), grads, g)  # noqa: B023  # used at once
        start += size
    return (total, state), grads


@pytest.mark.parametrize(("size", "sizes"), [(4, (4, 4, 3)), (11, (11,))])
def test_state_goes_from_micro_batch_to_micro_batch(size, sizes):
    found = in_micro_batches(moving, size, state_argnum=2)(PARAMS, BATCH, STATE)
    assert_same(found, by_hand(sizes))


def test_state_and_aux_come_with_the_loss_together():
    def loss_fn(params, batch, state):
        loss, state = moving(params, batch, state)
        return loss, (state, batch[0])

    options = {"micro_batch_size": 4, "state_argnum": 2, "has_aux": True}
    (loss, aux), grads = jax.jit(gradaccum.jax.value_and_grad(loss_fn, **options))(PARAMS, BATCH, STATE)
    (expected, state), expected_grads = by_hand((4, 4, 3))
    assert_same((loss, aux, grads), (expected, (state, BATCH[0]), expected_grads))
    again = jax.jit(gradaccum.jax.grad(loss_fn, **options))(PARAMS, BATCH, STATE)
    assert_same(again, (grads, aux))


def test_statistics_pooled_over_the_batch_are_an_aux():
    """The words of the other shells: `micro` is `state_argnum`, `frozen` is to ignore it, `pooled` is this."""

    def loss_fn(params, batch, mean):
        loss, state = moving(params, batch, {"mean": mean, "updates": 0})
        return squared_error(params, batch) + 0 * loss, state["mean"]

    (_, mean), _ = in_micro_batches(loss_fn, 4, has_aux=True, aux="mean")(PARAMS, BATCH, jnp.ones(5))
    np.testing.assert_allclose(mean, 0.9 + 0.1 * BATCH[0].mean(0), rtol=1e-12)
