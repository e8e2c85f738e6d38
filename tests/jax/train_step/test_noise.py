"""`noise_scale=True`: the norms of the first micro-batch's gradient and of the whole batch's, beside the gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from gradaccum.core.noise import Norms
from tests.jax.problems import (
    BATCH,
    PARAMS,
    assert_same,
    at_once,
    counted,
    errors,
    in_micro_batches,
    masked_error,
    mesh_of,
    outputs,
    placed,
    rows,
    squared_error,
    stacked,
    taken,
)


def slope(w, x):
    """Its gradient is the mean of the rows."""
    return (x @ w).mean()


def draws(updates):
    """Batches of 8 rows, of mean 1 and variance 4 in each of 10 columns: the noise scale is 4 rows."""
    return 1 + np.random.default_rng(0).normal(size=(updates, 8, 10), scale=2)


def test_the_noise_scale_is_measured_in_a_training_loop():
    grad_fn = in_micro_batches(slope, 2, noise_scale=True)
    scale = gradaccum.jax.noise_scale([grad_fn(jnp.zeros(10), batch)[2] for batch in draws(300)])
    assert scale.interval[0] < 4 < scale.interval[1] < 10
    assert (scale.updates, scale.batch_size, scale.unit) == (300, 8, "rows")


def test_what_a_scan_over_updates_stacks_is_the_list_of_them():
    grad_fn, params = in_micro_batches(slope, 3, noise_scale=True), jnp.zeros(10)
    _, scanned = jax.jit(lambda batches: jax.lax.scan(lambda c, x: (c, grad_fn(params, x)[2]), 0, batches))(draws(20))
    listed = [grad_fn(params, batch)[2] for batch in draws(20)]
    assert_same(scanned, stacked(*listed))
    again = [Norms(*numbers) for numbers in zip(*scanned)]
    assert gradaccum.jax.noise_scale(scanned) == gradaccum.jax.noise_scale(again)
    assert gradaccum.jax.noise_scale(scanned).updates == gradaccum.jax.noise_scale(listed).updates == 20
    assert math.isnan(gradaccum.jax.noise_scale([]).value)
    assert math.isnan(gradaccum.jax.noise_scale(listed[0]).value)


def of_rows(loss_fn, batch, start, stop):
    """The squared norm of the mean gradient of some rows, by plain JAX."""
    gradients = at_once(loss_fn)(PARAMS, taken(batch, start, stop))[1]
    return sum(float((abs(np.asarray(leaf)) ** 2).sum()) for leaf in jax.tree.leaves(gradients))


def assert_norms(norms, *expected):
    assert isinstance(norms, Norms)
    assert_same(list(map(jnp.asarray, norms)), list(map(jnp.asarray, expected)))


def summed(params, batch):
    return errors(params, *batch).sum()


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "count"),
    [
        *((squared_error, "mean", count) for count in (11, 3)),
        (summed, "sum", 11),
        pytest.param(squared_error, "mean", 12, marks=pytest.mark.slow),
        *(pytest.param(summed, "sum", count, marks=pytest.mark.slow) for count in (12, 3)),
    ],
)
def test_the_norms_are_those_of_the_first_micro_batch_and_the_large_batch(loss_fn, reduction, count):
    """12 rows are 4 4 4; 11 are 4 4 3; 3 are one micro-batch, which tells nothing."""
    batch, size = rows(count), min(count, 4)
    *found, norms = in_micro_batches(loss_fn, 4, reduction=reduction, noise_scale=True)(PARAMS, batch)
    assert_same(tuple(found), at_once(loss_fn)(PARAMS, batch))
    assert_norms(norms, of_rows(squared_error, batch, 0, size), size, of_rows(squared_error, batch, 0, count), count)
    assert norms.usable == (count > 4)


MASK = (np.arange(11) % 3 > 0).astype(float)


@pytest.mark.parametrize("first", [0, 4], ids=["", "the first micro-batch has no weight"])
def test_with_a_weight_the_first_micro_batch_that_counts_is_measured(first):
    batch = (*BATCH, MASK * (np.arange(11) >= first))
    norms = in_micro_batches(masked_error, 4, weight=counted, noise_scale=True)(PARAMS, batch)[2]
    small = of_rows(masked_error, batch, first, first + 4)
    assert_norms(norms, small, 4, of_rows(masked_error, batch, 0, 11), 11)


def test_with_several_losses_the_first_micro_batch_is_divided_as_the_large_batch_is():
    def two(params, batch):
        return {
            "masked": (masked_error(params, batch), counted(batch)),
            "all": ((outputs(params, batch[0]) ** 2).mean(), len(batch[0])),
        }

    def first_rows(params, batch):
        x, y, mask = batch
        first = (np.arange(11) < 4) * (11 / 4)
        kept = (errors(params, x, y) * mask * first).sum() / mask.sum()
        return kept + ((outputs(params, x) ** 2).mean(-1) * first).mean()

    def total(params, batch):
        return sum(loss for loss, _ in two(params, batch).values())

    batch = (*BATCH, MASK)
    norms = in_micro_batches(two, 4, noise_scale=True)(PARAMS, batch)[2]
    assert_norms(norms, of_rows(first_rows, batch, 0, 11), 4, of_rows(total, batch, 0, 11), 11)


def test_norms_come_last_and_gradients_of_rows_are_no_part_of_them():
    def loss_fn(params, x, state):
        return squared_error(params, (x, jnp.zeros((len(x), 3)))), (state + 1, x[:, 0])

    keywords = {"argnums": (0, 1), "has_aux": True, "state_argnum": 2, "noise_scale": True}
    (_, (state, aux)), grads, norms = in_micro_batches(loss_fn, 4, **keywords)(PARAMS, BATCH[0], 0)
    assert (int(state), aux.shape) == (3, (11,))
    zeros = BATCH[0], jnp.zeros((11, 3))
    assert_norms(norms, of_rows(squared_error, zeros, 0, 4), 4, of_rows(squared_error, zeros, 0, 11), 11)
    again = jax.jit(gradaccum.jax.grad(loss_fn, micro_batch_size=4, **keywords))(PARAMS, BATCH[0], 0)
    assert_same(again, (grads, (state, aux), norms))
    assert len(jax.jit(gradaccum.jax.grad(slope, micro_batch_size=2, noise_scale=True))(jnp.ones(5), BATCH[0])) == 2


@pytest.mark.parametrize("size", [2, 11])
def test_where_only_rows_are_differentiated_there_is_nothing_to_measure(size):
    with pytest.raises(ValueError, match="noise_scale=True measures gradients that are summed over rows"):
        in_micro_batches(slope, size, argnums=1, noise_scale=True)(jnp.ones(5), BATCH[0])


def test_on_explicit_axes_each_device_measures_a_micro_batch_of_its_own():
    mesh, batch = mesh_of("Explicit"), (*rows(32), np.ones(32))
    batch[2][:8] = 0  # all of the first device's: three measure
    batch[2][8:14] = 0  # and two micro-batches of the second: 3 3 2
    step = in_micro_batches(masked_error, 12, weight=counted, noise_scale=True)
    *found, norms = step(placed(PARAMS, mesh, P()), placed(batch, mesh))
    assert_same(tuple(found), at_once(masked_error)(PARAMS, batch))
    small = np.mean([of_rows(masked_error, batch, *part) for part in ((14, 16), (16, 19), (24, 27))])
    assert_norms(norms, small, 3 / (1 / 2 + 1 / 3 + 1 / 3), of_rows(masked_error, batch, 0, 32), 32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_the_norms_are_those_of_the_devices_own_rows(check_vma):
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size=3, noise_scale=True)

    @jax.jit
    @jax.shard_map(mesh=mesh_of("Auto"), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    def step(params, batch):
        return jax.lax.pmean(grad_fn(params, batch)[2], "data")

    batch = rows(32)
    small, large = (np.mean([of_rows(squared_error, batch, n, n + size) for n in range(0, 32, 8)]) for size in (3, 8))
    assert_norms(step(PARAMS, batch), small, 3, large, 8)
