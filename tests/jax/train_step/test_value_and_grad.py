"""`value_and_grad` gives what `jax.value_and_grad` gives on the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum.jax
from tests.jax.problems import at_once, in_micro_batches, network, outputs, rows, squared_error, tree_error
from tests.reference import FLOAT32, FLOAT64


def test_ragged_micro_batches_match_the_large_batch():
    params, batch = network(), rows(11)
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size=4)
    expected = at_once(squared_error)(params, batch)
    assert tree_error(jax.jit(grad_fn)(params, batch), expected) <= FLOAT64


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.slow), optax.adam(0.1)],
    ids=["sgd", "adam"],
)
def test_a_training_loop_over_ragged_batches_matches_plain_jax(optimizer):
    """The user's loop: any optax optimizer, a clip and a schedule come after it, and see one gradient per update."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optimizer, optax.scale_by_schedule(optax.linear_schedule(1, 0.1, 5))
    )

    def train(value_and_grad):
        @jax.jit
        def update(params, state, batch):
            loss, grads = value_and_grad(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        params = network()
        state, losses = optimizer.init(params), []
        for seed, count in enumerate([12, 12, 12, 7]):
            params, state, loss = update(params, state, rows(count, seed))
            losses.append(loss)
        return params, state, losses

    split = train(gradaccum.jax.value_and_grad(squared_error, micro_batch_size=5))
    assert tree_error(split, train(jax.value_and_grad(squared_error))) <= FLOAT64


@pytest.mark.parametrize(
    "size", [1, 7, 100, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 4, 6, 12))]
)
def test_any_size_matches_the_large_batch(size):
    params, batch = network(), rows(12)
    split = in_micro_batches(squared_error, size)
    assert tree_error(split(params, batch), at_once(squared_error)(params, batch)) <= FLOAT64


def test_negative_argnums_count_from_the_last_argument_as_in_jax():
    def loss_fn(params, batch, scale):
        return squared_error(params, batch) * scale

    args = network(), rows(5), jnp.asarray(2.0)
    split = in_micro_batches(loss_fn, 2, argnums=(-1, 0))(*args)
    assert tree_error(split, at_once(loss_fn, argnums=(-1, 0))(*args)) <= FLOAT64


def test_a_batch_smaller_than_the_micro_batch_is_plain_jax_bit_for_bit():
    params, batch = network(), rows(3)
    split = in_micro_batches(squared_error, 8)(params, batch)
    plain = at_once(squared_error)(params, batch)
    assert tree_error(split, plain) == 0


def test_float32_is_exact_to_1e_6():
    params, batch = network(dtype=jnp.float32), rows(1000, dtype=jnp.float32)
    split = in_micro_batches(squared_error, 7)(params, batch)
    assert jax.tree.leaves(split)[0].dtype == jnp.float32
    double = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, batch))
    assert tree_error(split, at_once(squared_error)(*double)) <= FLOAT32


def test_a_sum_over_rows_is_summed():
    params, batch = network(), rows(11)

    def summed(params, batch):
        return squared_error(params, batch) * len(batch[0])

    split = in_micro_batches(summed, 4, reduction="sum")
    assert tree_error(split(params, batch), at_once(summed)(params, batch)) <= FLOAT64


def test_grad_gives_the_gradients_alone():
    params, batch = network(), rows(11)
    split = jax.jit(gradaccum.jax.grad(squared_error, micro_batch_size=4))(params, batch)
    assert tree_error(split, at_once(squared_error)(params, batch)[1]) <= FLOAT64


def two_models(first, x, second, y, *, scale):
    return ((outputs(first, x) * scale - outputs(second, x) - y) ** 2).mean()


@pytest.mark.parametrize("argnums", [2, (2, 0), (0,)])
def test_argnums_and_batch_argnums_are_those_of_jax(argnums):
    (x, y), first, second = rows(11), network(), network(2)
    split = in_micro_batches(two_models, 4, argnums=argnums, batch_argnums=(1, 3))
    plain = at_once(two_models, argnums=argnums)
    args = (first, x, second, y)
    assert tree_error(split(*args, scale=2.0), plain(*args, scale=2.0)) <= FLOAT64


@pytest.mark.parametrize("size", [4, 100])
def test_gradients_of_the_batch_have_its_rows_and_of_what_is_shared_the_sum(size):
    params, (x, y) = network(), rows(11)

    def loss_fn(params, batch):
        return (((outputs(params, batch["x"].T) - batch["y"]) * batch["scale"]) ** 2).mean()

    batch = {"x": x.T, "y": y, "scale": jnp.asarray(1.5)}
    split = in_micro_batches(loss_fn, size, argnums=(0, 1), in_axes={"x": 1, "y": 0, "scale": None})
    expected = at_once(loss_fn, argnums=(0, 1))(params, batch)
    assert tree_error(split(params, batch), expected) <= FLOAT64


def test_in_axes_are_those_of_vmap():
    params, (x, y) = network(), rows(10)
    positions, table = jnp.arange(10) % 3, jnp.linspace(0.0, 1.0, 15).reshape(3, 5)

    def loss_fn(params, inputs, y):
        x, (positions, table) = inputs
        return ((outputs(params, x.T + table[positions]) - jnp.moveaxis(y, -1, 0)) ** 2).mean()

    args = (params, (x.T, (positions, table)), y.T)
    split = in_micro_batches(loss_fn, 4, batch_argnums=(1, 2), in_axes=((-1, (0, None)), -1))
    assert tree_error(split(*args), at_once(loss_fn)(*args)) <= FLOAT64


def test_none_integer_boolean_and_host_leaves_are_taken():
    params = {**network(), "unused": None}
    x, _ = rows(11)
    batch = {
        "x": np.asarray(x),
        "label": np.arange(11) % 3,
        "keep": jnp.arange(11) % 2 == 0,
        "nothing": None,
        "keys": jax.random.split(jax.random.key(0), 11),
    }

    def loss_fn(params, batch):
        assert batch["nothing"] is None
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["keys"])
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs(params, batch["x"]) + noise, batch["label"])
        return jnp.where(batch["keep"], losses, 0).mean()

    split = in_micro_batches(loss_fn, 4)(params, batch)
    assert tree_error(split, at_once(loss_fn)(params, batch)) <= FLOAT64


def test_complex_parameters():
    w = jnp.asarray([1 + 2j, -0.5 + 1j, 0.25j])

    def loss_fn(w, x):
        return (jnp.abs(x @ w) ** 2).mean()

    x = rows(11, inputs=3)[0]
    for dtype in (None, jnp.float64):
        split = in_micro_batches(loss_fn, 4, accumulate_dtype=dtype)(w, x)
        expected = at_once(loss_fn)(w, x)
        assert abs(split[0] - expected[0]) <= FLOAT64 * abs(expected[0])
        assert abs(split[1] - expected[1]).max() <= FLOAT64 * abs(expected[1]).max()
        assert split[1].dtype == expected[1].dtype


def slope(w, x):
    return (w * x).mean()


@pytest.mark.parametrize(
    ("dtype", "accumulate_dtype", "largest"),
    [(jnp.bfloat16, None, 2.0**-8), (jnp.float16, None, 2.0**-11), (jnp.float32, jnp.float64, 2.0**-24)],
)
def test_narrow_gradients_are_summed_in_a_wider_dtype_and_returned_in_their_own(dtype, accumulate_dtype, largest):
    x = (1 + jnp.arange(4096) % 7 / 64).astype(dtype)  # in bfloat16 the sum would stop at 256
    split = in_micro_batches(slope, 1, accumulate_dtype=accumulate_dtype)
    loss, gradient = split(jnp.ones((), dtype), x)
    assert loss.dtype == gradient.dtype == dtype
    exact = np.asarray(x, np.float64).mean()
    assert abs(float(gradient) - exact) <= largest * exact
    assert abs(float(loss) - exact) <= largest * exact


def test_accumulate_dtype_is_the_dtype_of_the_sums():
    x = jnp.ones(4096, jnp.float32)
    split = in_micro_batches(slope, 1, accumulate_dtype=jnp.bfloat16)
    assert float(split(jnp.ones((), jnp.float32), x)[1]) == 256 / 4096  # where ones no longer count


def test_keywords_and_static_arguments_reach_every_micro_batch():
    params, batch = network(), rows(11)

    def loss_fn(params, batch, kind, *, power):
        assert kind == "even"
        return (abs(outputs(params, batch[0])) ** power).mean()

    def even(value_and_grad):
        return jax.jit(lambda params, batch: value_and_grad(params, batch, "even", power=2))(params, batch)

    split = even(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4))
    assert tree_error(split, even(jax.value_and_grad(loss_fn))) <= FLOAT64


def test_it_bears_the_name_of_the_loss():
    assert gradaccum.jax.value_and_grad(squared_error, micro_batch_size=4).__name__ == "value_and_grad_of_squared_error"
    assert gradaccum.jax.grad(squared_error, micro_batch_size=4).__name__ == "grad_of_squared_error"
