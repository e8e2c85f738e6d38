"""`noise_scale=True`: the norms of the first micro-batch's gradient and of the whole batch's, beside the gradients.

`test_calls` compares them on one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from gradaccum.core.noise import Norms
from tests.jax.comparisons import assert_same, at_once, in_micro_batches, mesh_of, placed
from tests.jax.problems import BATCH, PARAMS, counted, masked_error, rows, squared_error, stacked, taken
from tests.jax.train_step.test_calls import squared


def slope(w, x):
    """Its gradient is the mean of the rows."""
    return (x @ w).mean()


def draws(updates):
    """Batches of 8 rows, of mean 1 and variance 4 in each of 10 columns: the noise scale is 4 rows."""
    return 1 + np.random.default_rng(0).normal(size=(updates, 8, 10), scale=2)


def test_the_noise_scale_is_measured_in_a_training_loop_and_what_a_scan_over_updates_stacks_is_the_list_of_them():
    grad_fn, params, batches = in_micro_batches(slope, 3, noise_scale=True), jnp.zeros(10), draws(300)
    _, scanned = jax.jit(lambda batches: jax.lax.scan(lambda c, x: (c, grad_fn(params, x)[2]), 0, batches))(batches)
    listed = [grad_fn(params, batch)[2] for batch in batches]
    assert_same(scanned, stacked(*listed))
    again = [Norms(*numbers) for numbers in zip(*scanned)]
    scale = gradaccum.jax.noise_scale(scanned)
    assert scale == gradaccum.jax.noise_scale(again)
    assert scale.interval[0] < 4 < scale.interval[1] < 10
    assert (scale.updates, scale.batch_size, scale.unit) == (300, 8, "rows")
    assert gradaccum.jax.noise_scale(listed).updates == 300
    assert math.isnan(gradaccum.jax.noise_scale([]).value)
    assert math.isnan(gradaccum.jax.noise_scale(listed[0]).value)


def of_rows(loss_fn, batch, start, stop):
    """The squared norm of the mean gradient of some rows, by plain JAX."""
    return squared(at_once(loss_fn)(PARAMS, taken(batch, start, stop))[1])


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
    assert_same(norms, Norms(small, 3 / (1 / 2 + 1 / 3 + 1 / 3), of_rows(masked_error, batch, 0, 32), 32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_the_norms_are_those_of_the_devices_own_rows(check_vma):
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size=3, noise_scale=True)

    @jax.jit
    @jax.shard_map(mesh=mesh_of("Auto"), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    def step(params, batch):
        return jax.lax.pmean(grad_fn(params, batch)[2], "data")

    batch = rows(32)
    small, large = (np.mean([of_rows(squared_error, batch, n, n + size) for n in range(0, 32, 8)]) for size in (3, 8))
    assert_same(step(PARAMS, batch), Norms(small, 3, large, 8))
