"""Inside whatever the user transforms; and in the memory of one micro-batch."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import gradaccum.jax
from tests.jax.problems import (
    assert_same,
    at_once,
    counted,
    in_micro_batches,
    masked_error,
    network,
    rows,
    squared_error,
    stacked,
)


def over_models(value_and_grad):
    """Weights that are 0 for one of them and not for the other, too."""
    batch = (*rows(11), jnp.stack([jnp.arange(11) % 3 == 0, jnp.arange(11) > 7]))
    return jax.vmap(value_and_grad, (0, (None, None, 0)))(stacked(network(0), network(1)), batch)


def over_updates(value_and_grad):
    def update(params, batch):
        loss, grads = value_and_grad(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return jax.lax.scan(update, network(), stacked(*(rows(7, seed) for seed in range(3))))


def second_derivative(value_and_grad):
    def squared(params):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(value_and_grad(params, rows(7))[1]))

    return jax.grad(squared)(network())


@pytest.mark.parametrize(
    ("program", "loss_fn", "options"),
    [
        (over_models, masked_error, {"weight": counted}),
        (over_updates, squared_error, {}),
        (second_derivative, squared_error, {}),
    ],
    ids=["vmap over models", "scan over updates", "second derivative"],
)
def test_transformed_it_is_what_plain_jax_is(program, loss_fn, options):
    split = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, **options)
    found, expected = (jax.jit(lambda of=of: program(of))() for of in (split, jax.value_and_grad(loss_fn)))
    assert_same(found, expected)


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


# Memory.


def deep(params, batch):
    """Activations are what takes the memory: 64 bytes of input, 8 layers of 1 KiB per row."""
    x = batch @ params["in"]
    for _ in range(8):
        x = jnp.sin(x @ params["mid"])
    return (x**2).mean()


DEEP = {"in": jax.ShapeDtypeStruct((8, 128), jnp.float64), "mid": jax.ShapeDtypeStruct((128, 128), jnp.float64)}


def analysis(function, count):
    """What XLA states of the memory of `deep`."""
    batch = jax.ShapeDtypeStruct((count, 8), jnp.float64)
    return function.lower(DEEP, batch).compile().memory_analysis()


def test_the_memory_is_that_of_one_micro_batch_however_many_there_are_and_that_of_a_scan_by_hand():
    def by_hand(params, batch):
        def body(sums, rows):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(deep)(params, rows)), None

        zeros = (jnp.zeros((), batch.dtype), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(body, zeros, batch.reshape(-1, 16, 8))
        return jax.tree.map(lambda leaf: leaf / (len(batch) // 16), sums)

    few, many = (analysis(in_micro_batches(deep, 16), count).temp_size_in_bytes for count in (64, 1024))
    gradients = 8 * (8 * 128 + 128 * 128)
    assert many == few, "temporaries grow with the number of micro-batches"
    assert many <= analysis(at_once(deep), 16).temp_size_in_bytes + 2 * gradients
    assert many <= 1.001 * analysis(jax.jit(by_hand), 1024).temp_size_in_bytes
    assert analysis(at_once(deep), 1024).temp_size_in_bytes > 5 * many


def test_there_are_two_bodies_at_most():
    traced = []

    def loss_fn(w, x):
        traced.append(x.shape)
        return (w * x).mean()

    text = in_micro_batches(loss_fn, 4, verify=False).lower(1.0, jnp.ones(50)).as_text()  # 11 of 4 rows, 2 of 3
    assert set(traced) == {(4,), (3,)}
    assert text.count("stablehlo.while") == 2
    assert in_micro_batches(loss_fn, 4).lower(1.0, jnp.ones(48)).as_text().count("stablehlo.while") == 1
