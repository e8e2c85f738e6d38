"""Inside whatever the user transforms; and in the memory of one micro-batch."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import gradaccum.jax
from tests.jax.problems import at_once, in_micro_batches, network, outputs, rows, squared_error, tree_error
from tests.reference import FLOAT64


def test_under_vmap_each_of_several_models_is_trained():
    """Weights that are 0 for one of them and not for the other, too."""
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), network(0), network(1))
    batch = (*rows(11), jnp.stack([jnp.arange(11) % 3 == 0, jnp.arange(11) > 7]))

    def loss_fn(params, batch):
        x, y, mask = batch
        return (((outputs(params, x) - y) ** 2).sum(-1) * mask).sum() / mask.sum()

    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, weight=lambda batch: batch[2].sum())
    axes = (0, (None, None, 0))
    expected = jax.jit(jax.vmap(jax.value_and_grad(loss_fn), axes))(params, batch)
    assert tree_error(jax.jit(jax.vmap(grad_fn, axes))(params, batch), expected) <= FLOAT64


def test_inside_a_scan_over_updates_with_checkpointed_layers():
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(rows(7, seed) for seed in range(3)))

    def loss_fn(params, batch):
        x, y = batch
        return ((jax.checkpoint(outputs)(params, x) - y) ** 2).mean()

    def train(value_and_grad):
        def update(params, batch):
            loss, grads = value_and_grad(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        return jax.jit(lambda params: jax.lax.scan(update, params, batches))(network())

    split = train(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3))
    assert tree_error(split, train(jax.value_and_grad(loss_fn))) <= FLOAT64


def test_checkify_sees_an_error_in_a_micro_batch():
    def loss_fn(w, x):
        checkify.check(x.min() >= 0, "a row below 0")
        return (w * x).mean()

    step = jax.jit(checkify.checkify(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=2)))
    error, (loss, _) = step(1.0, jnp.arange(5.0))
    error.throw()
    assert float(loss) == 2.0
    error, _ = step(1.0, jnp.asarray([1.0, 1.0, 1.0, 1.0, -1.0]))
    with pytest.raises(checkify.JaxRuntimeError, match="a row below 0"):
        error.throw()


def test_debug_nans_sees_a_nan_of_the_loss_and_no_other():
    step = in_micro_batches(lambda w, x: jnp.log(w * x).mean(), 2, weight=lambda x: (x > 0).sum(), verify=False)
    with jax.debug_nans(True):
        step(1.0, jnp.arange(1.0, 6.0))
        with pytest.raises(FloatingPointError):
            step(-1.0, jnp.arange(1.0, 6.0))


def test_a_second_derivative_is_that_of_the_large_batch():
    params, batch = network(), rows(7)

    def norm(value_and_grad):
        def squared(params):
            _, grads = value_and_grad(params, batch)
            return sum((leaf**2).sum() for leaf in jax.tree.leaves(grads))

        return jax.jit(jax.grad(squared))(params)

    split = norm(gradaccum.jax.value_and_grad(squared_error, micro_batch_size=3))
    assert tree_error(split, norm(jax.value_and_grad(squared_error))) <= FLOAT64


def deep(params, batch):
    """Activations are what takes the memory: 64 bytes of input, 8 layers of 1 KiB per row."""
    x = batch @ params["in"]
    for _ in range(8):
        x = jnp.sin(x @ params["mid"])
    return (x**2).mean()


def bytes_of(function, count):
    kinds = {"in": jax.ShapeDtypeStruct((8, 128), jnp.float64), "mid": jax.ShapeDtypeStruct((128, 128), jnp.float64)}
    batch = jax.ShapeDtypeStruct((count, 8), jnp.float64)
    return function.lower(kinds, batch).compile().memory_analysis().temp_size_in_bytes


def test_the_memory_is_that_of_one_micro_batch_however_many_there_are():
    of_one = bytes_of(at_once(deep), 16)
    sizes = [bytes_of(in_micro_batches(deep, 16), count) for count in (64, 1024)]
    gradients = 8 * (8 * 128 + 128 * 128)
    assert sizes[1] == sizes[0], "temporaries grow with the number of micro-batches"
    assert sizes[1] <= of_one + 2 * gradients, "more than a micro-batch, its gradients and their sum"
    assert bytes_of(at_once(deep), 1024) > 5 * sizes[1]


def test_the_memory_of_a_hand_written_scan_is_not_exceeded():
    def by_hand(params, batch):
        def body(sums, rows):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(deep)(params, rows)), None

        zeros = (jnp.zeros((), batch.dtype), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(body, zeros, batch.reshape(-1, 16, 8))
        return jax.tree.map(lambda leaf: leaf / (len(batch) // 16), sums)

    assert bytes_of(in_micro_batches(deep, 16), 256) <= 1.001 * bytes_of(jax.jit(by_hand), 256)


def test_there_are_two_bodies_at_most():
    traced = []

    def loss_fn(w, x):
        traced.append(x.shape)
        return (w * x).mean()

    step = in_micro_batches(loss_fn, 4, verify=False)
    text = step.lower(1.0, jnp.ones(50)).as_text()  # 11 micro-batches of 4, 2 of 3
    assert set(traced) == {(4,), (3,)}
    assert text.count("stablehlo.while") == 2
    assert in_micro_batches(loss_fn, 4).lower(1.0, jnp.ones(48)).as_text().count("stablehlo.while") == 1
