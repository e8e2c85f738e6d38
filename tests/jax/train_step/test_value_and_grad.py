"""`value_and_grad` is `jax.value_and_grad` on the whole batch: over rows and tokens. More of it in `test_calls`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum.jax
from tests.jax.comparisons import assert_large_batch, assert_same, at_once, in_micro_batches
from tests.jax.problems import BATCH, PARAMS, errors, network, outputs, rows, squared_error
from tests.reference import FLOAT32

X, Y = BATCH
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def test_ragged_micro_batches_match_the_large_batch():
    assert_large_batch(squared_error, 4, PARAMS, BATCH)


def in_columns(params, batch):
    return (((outputs(params, batch["x"].T) - batch["y"]) * batch["scale"]) ** 2).mean()


def looked_up(params, inputs, y):
    x, (positions, table) = inputs
    return ((outputs(params, x.T + table[positions]) - jnp.moveaxis(y, -1, 0)) ** 2).mean()


def of_any_leaves(params, batch):
    assert batch["nothing"] is None
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["keys"])
    losses = cross_entropy(outputs(params, batch["x"]) + noise, batch["label"])
    return jnp.where(batch["keep"], losses, 0).mean()


CLASSES = jnp.asarray([0.1, 1.0, 3.0])
LABELS = jnp.arange(11) % 3


def class_weighed(params, x, labels):
    return (CLASSES[labels] * cross_entropy(outputs(params, x), labels)).sum() / CLASSES[labels].sum()


COLUMNS = {"x": X.T, "y": Y, "scale": jnp.asarray(1.5)}
TABLE = jnp.linspace(0.0, 1.0, 15).reshape(3, 5)
LEAVES = {
    "x": np.asarray(X),
    "label": np.arange(11) % 3,
    "keep": jnp.arange(11) % 2 == 0,
    "nothing": None,
    "keys": jax.random.split(jax.random.key(0), 11),
}
CASES = {
    **{f"12 rows by {size}": (squared_error, size, (PARAMS, rows(12)), {}) for size in (1, 7, 100)},
    "argnums from the last argument": (
        lambda p, b, scale: squared_error(p, b) * scale, 2, (PARAMS, rows(5), jnp.asarray(2.0)), {"argnums": (-1, 0)},
    ),
    **{
        f"argnums {argnums}": (
            lambda p, x, q, y: errors(p, x, y + outputs(q, x)).mean(), 4, (PARAMS, X, network(2), Y),
            {"argnums": argnums, "batch_argnums": (1, 3)},
        )
        for argnums in (2, (2, 0), (0,))
    },
    **{
        f"gradients of rows and of what is shared, by {size}": (
            in_columns, size, (PARAMS, COLUMNS), {"argnums": (0, 1), "in_axes": {"x": 1, "y": 0, "scale": None}},
        )
        for size in (4, 100)
    },
    "in_axes of vmap": (
        looked_up, 4, (PARAMS, (X.T, (jnp.arange(11) % 3, TABLE)), Y.T),
        {"batch_argnums": (1, 2), "in_axes": ((-1, (0, None)), -1)},
    ),
    "None, integer, boolean, key and host leaves": (of_any_leaves, 4, ({**PARAMS, "unused": None}, LEAVES), {}),
    "checkpointed layers": (
        lambda p, b: ((jax.checkpoint(outputs)(p, b[0]) - b[1]) ** 2).mean(), 4, (PARAMS, BATCH), {},
    ),
    "class weights": (
        class_weighed, 4, (PARAMS, X, LABELS),
        {"batch_argnums": (1, 2), "weight": lambda x, labels: CLASSES[labels].sum()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_large_batches(name):
    loss_fn, size, args, options = CASES[name]
    assert_large_batch(loss_fn, size, *args, **options)


def test_a_batch_smaller_than_the_micro_batch_is_plain_jax_bit_for_bit():
    assert_large_batch(squared_error, 8, PARAMS, rows(3), within=0)


def test_float32_is_exact_to_1e_6():
    params, batch = network(dtype=jnp.float32), rows(1000, dtype=jnp.float32)
    split = in_micro_batches(squared_error, 7)(params, batch)
    assert jax.tree.leaves(split)[0].dtype == jnp.float32
    double = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, batch))
    assert_same(split, at_once(squared_error)(*double), FLOAT32)


@pytest.mark.parametrize("dtype", [None, jnp.float64])
def test_complex_parameters(dtype):
    def loss_fn(w, x):
        return (jnp.abs(x @ w) ** 2).mean()

    args = jnp.asarray([1 + 2j, -0.5 + 1j, 0.25j]), rows(11, inputs=3)[0]
    found, expected = (of(*args) for of in (in_micro_batches(loss_fn, 4, accumulate_dtype=dtype), at_once(loss_fn)))
    assert_same(*([loss, grad.real, grad.imag] for loss, grad in (found, expected)))
    assert found[1].dtype == expected[1].dtype


def slope(w, x):
    return (w * x).mean()


@pytest.mark.parametrize(
    ("dtype", "accumulate_dtype", "largest"),
    [(jnp.bfloat16, None, 2.0**-8), (jnp.float16, None, 2.0**-11), (jnp.float32, jnp.float64, 2.0**-24)],
)
def test_narrow_gradients_are_summed_in_a_wider_dtype_and_returned_in_their_own(dtype, accumulate_dtype, largest):
    x = (1 + jnp.arange(4096) % 7 / 64).astype(dtype)  # in bfloat16 the sum would stop at 256
    exact = np.asarray(x, np.float64).mean()
    for found in in_micro_batches(slope, 1, accumulate_dtype=accumulate_dtype)(jnp.ones((), dtype), x):
        assert found.dtype == dtype
        assert abs(float(found) - exact) <= largest * exact


def test_accumulate_dtype_is_the_dtype_of_the_sums():
    split = in_micro_batches(slope, 1, accumulate_dtype=jnp.bfloat16)
    found = split(jnp.ones((), jnp.float32), jnp.ones(4096, jnp.float32))
    assert float(found[1]) == 256 / 4096  # where ones no longer count


def test_grad_gives_the_gradients_and_what_comes_with_the_loss_and_both_bear_its_name():
    def loss_fn(params, batch, state):
        return squared_error(params, batch), (state + 1, (batch[0][:, 0] > 0, batch[1]))

    options = {"micro_batch_size": 4, "has_aux": True, "state_argnum": 2, "noise_scale": True}
    both, alone = gradaccum.jax.value_and_grad(loss_fn, **options), gradaccum.jax.grad(loss_fn, **options)
    (loss, more), *rest = jax.jit(both)(PARAMS, BATCH, 0)
    assert_same((loss, rest[0]), at_once(squared_error)(PARAMS, BATCH))
    assert_same(more, (3, (BATCH[0][:, 0] > 0, BATCH[1])), 0)
    assert_same(jax.jit(alone)(PARAMS, BATCH, 0), (rest[0], more, rest[1]))
    assert (both.__name__, alone.__name__) == ("value_and_grad_of_loss_fn", "grad_of_loss_fn")
    assert_same(jax.jit(gradaccum.jax.grad(squared_error, micro_batch_size=4))(PARAMS, BATCH), rest[0])


# Means over something else than rows.


def tokens(count=11, ignored=(), seed=0):
    """Rows of 4 tokens of which some count; all of `ignored` rows' don't."""
    numbers = jnp.arange(count * 4).reshape(count, 4)
    return {
        "x": rows(count * 4, seed)[0].reshape(count, 4, -1),
        "label": numbers % 3,
        # Of floats: a product with booleans XLA makes a select, which hides NaN.
        "mask": (numbers * 7 % 5 > 1).at[jnp.asarray(ignored, int)].set(False).astype(float),
    }


def token_losses(params, batch):
    return cross_entropy(outputs(params, batch["x"]), batch["label"])


def token_mean(params, batch):
    """0 / 0 where no token counts."""
    return (token_losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def tokens_of(batch):
    return batch["mask"].sum()


TOKENS = in_micro_batches(token_mean, 4, weight=tokens_of)
"""Compiled once: all batches have 11 rows."""


def test_without_any_weight_the_loss_has_its_own_answer():
    batch = tokens(ignored=range(11))

    def guarded(params, batch):
        return (token_losses(params, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)

    found, expected = (jax.tree.leaves(of(PARAMS, batch)) for of in (TOKENS, at_once(token_mean)))
    assert jnp.isnan(found[0])
    assert all((jnp.isnan(a) == jnp.isnan(b)).all() for a, b in zip(found, expected, strict=True))
    assert_large_batch(guarded, 4, PARAMS, batch, weight=tokens_of)


def test_a_nan_in_a_micro_batch_that_counts_is_not_hidden():
    batch = tokens()
    loss, grads = TOKENS(PARAMS, batch | {"x": batch["x"].at[5].set(jnp.nan)})
    assert jnp.isnan(loss)
    assert jnp.isnan(grads["out"]["kernel"]).all()


def certain(params, batch):
    chance = jax.nn.softmax(outputs(params, batch["x"])).max(-1)
    return {"certain": ((chance * token_losses(params, batch)).sum() / chance.sum(), chance.sum())}


@pytest.mark.parametrize(
    ("loss_fn", "args", "options"),
    [
        (certain, (PARAMS, tokens(8)), {}),
        (
            lambda w, batch: (w * batch["x"] * batch["s"]).sum() / batch["s"].sum(),
            (1.0, {"x": jnp.arange(8.0), "s": jnp.ones(8)}), {"argnums": 1, "weight": lambda batch: batch["s"].sum()},
        ),
    ],
    ids=["on parameters", "on rows that are differentiated"],
)  # fmt: skip
def test_a_weight_that_depends_on_what_is_differentiated_is_an_error(loss_fn, args, options):
    with pytest.raises(ValueError, match="The weight of a loss depends on what is differentiated"):
        in_micro_batches(loss_fn, 4, **options)(*args)


def test_a_weight_that_counts_what_parameters_decide_is_no_error():
    def loss_fn(params, batch):
        sure = jax.nn.softmax(outputs(params, batch["x"])).max(-1) > 0.5
        loss = (sure * token_losses(params, batch)).sum() / sure.sum()
        held = jax.lax.stop_gradient(outputs(params, batch["x"]).var())
        return {"sure": (loss, sure.sum()), "zero": (0.0 * loss, held)}

    expected = jax.jit(jax.grad(lambda params: loss_fn(params, tokens(8))["sure"][0]))(PARAMS)
    assert_same(in_micro_batches(loss_fn, 4)(PARAMS, tokens(8))[1], expected)


def test_the_functions_have_the_arguments_of_the_loss():
    def loss_fn(params, batch, power):
        return ((batch @ params) ** (2 if power == "two" else 4)).mean()

    arguments = jnp.ones(3), jnp.ones((6, 3)), "two"
    for of in (gradaccum.jax.value_and_grad, gradaccum.jax.grad):
        compiled = jax.jit(of(loss_fn, micro_batch_size=4), static_argnames="power")  # a name, passed by position
        expected = {gradaccum.jax.grad: jax.grad, gradaccum.jax.value_and_grad: jax.value_and_grad}[of](loss_fn)
        assert_same(compiled(*arguments), expected(*arguments))
    with pytest.raises(ValueError, match="or \"auto\". Received: 'fastest'"):
        gradaccum.jax.grad(loss_fn, micro_batch_size="fastest")  # type: ignore[arg-type]  # which mypy refuses, too
