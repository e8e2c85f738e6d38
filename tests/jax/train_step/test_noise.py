"""`noise_scale=True`: the norms of the first micro-batch's gradient and of the whole batch's, beside the gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from gradaccum.core.noise import Norms
from tests.jax.problems import at_once, in_micro_batches, network, outputs, rows, squared_error, tree_error
from tests.reference import FLOAT64


def slope(w, x):
    """Its gradient is the mean of the rows."""
    return (x @ w).mean()


def draws(updates, seed=0):
    """Batches of 8 rows, of mean 1 and variance 4 in each of 10 columns: the noise scale is 4 rows."""
    return 1 + np.random.default_rng(seed).normal(size=(updates, 8, 10), scale=2)


def test_the_noise_scale_is_measured_in_a_training_loop():
    grad_fn = in_micro_batches(slope, 2, noise_scale=True)
    params, measured = jnp.zeros(10), []
    for batch in draws(300):
        _, _, norms = grad_fn(params, batch)
        measured.append(norms)
    scale = gradaccum.jax.noise_scale(measured)
    assert scale.interval[0] < 4 < scale.interval[1] < 10
    assert (scale.updates, scale.batch_size, scale.unit) == (300, 8, "rows")


def test_what_a_scan_over_updates_stacks_is_the_list_of_them():
    grad_fn, batches = gradaccum.jax.value_and_grad(slope, micro_batch_size=3, noise_scale=True), draws(20)
    params = jnp.zeros(10)
    _, stacked = jax.jit(lambda batches: jax.lax.scan(lambda c, x: (c, grad_fn(params, x)[2]), 0, batches))(batches)
    listed = [jax.jit(grad_fn)(params, batch)[2] for batch in batches]
    assert tree_error(stacked, jax.tree.map(lambda *each: jnp.stack(each), *listed)) <= FLOAT64
    again = [Norms(*numbers) for numbers in zip(*stacked)]
    assert gradaccum.jax.noise_scale(stacked) == gradaccum.jax.noise_scale(again)
    assert gradaccum.jax.noise_scale(stacked).updates == gradaccum.jax.noise_scale(listed).updates == 20


def squared_norm(gradients):
    return sum(float((abs(np.asarray(leaf)) ** 2).sum()) for leaf in jax.tree.leaves(gradients))


def of_rows(loss_fn, params, batch, part):
    """The squared norm of the mean gradient of some rows, by plain JAX."""
    return squared_norm(at_once(loss_fn)(params, jax.tree.map(lambda leaf: leaf[part], batch))[1])


def assert_norms(norms, *expected):
    assert isinstance(norms, Norms)
    assert tree_error(list(map(jnp.asarray, norms)), list(map(jnp.asarray, expected))) <= FLOAT64


def summed(params, batch):
    return squared_error(params, batch) * len(batch[0])


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
    params, batch, size = network(), rows(count), min(count, 4)
    *found, norms = in_micro_batches(loss_fn, 4, reduction=reduction, noise_scale=True)(params, batch)
    assert tree_error(tuple(found), at_once(loss_fn)(params, batch)) <= FLOAT64
    small = of_rows(squared_error, params, batch, slice(size))
    assert_norms(norms, small, size, of_rows(squared_error, params, batch, slice(None)), count)
    assert norms.usable == (count > 4)


def masked(params, batch):
    x, y, mask = batch
    return (((outputs(params, x) - y) ** 2).sum(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("first", [0, 4], ids=["", "the first micro-batch has no weight"])
def test_with_a_weight_the_first_micro_batch_that_counts_is_measured(first):
    params, mask = network(), (np.arange(11) % 3 > 0).astype(float)
    mask[:first] = 0
    batch = (*rows(11), mask)
    _, _, norms = in_micro_batches(masked, 4, weight=lambda batch: batch[2].sum(), noise_scale=True)(params, batch)
    small = of_rows(masked, params, batch, slice(first, first + 4))
    assert_norms(norms, small, 4, of_rows(masked, params, batch, slice(None)), 11)


def test_with_several_losses_the_first_micro_batch_is_divided_as_the_large_batch_is():
    params, batch = network(), (*rows(11), (np.arange(11) % 3 > 0).astype(float))

    def two(params, batch):
        return {
            "masked": (masked(params, batch), batch[2].sum()),
            "all": ((outputs(params, batch[0]) ** 2).mean(), len(batch[0])),
        }

    def first_rows(params, batch):
        x, y, mask = batch
        first = (np.arange(11) < 4) * (11 / 4)
        kept = (((outputs(params, x) - y) ** 2).sum(-1) * mask * first).sum() / mask.sum()
        return kept + ((outputs(params, x) ** 2).mean(-1) * first).mean()

    def total(params, batch):
        return sum(loss for loss, _ in two(params, batch).values())

    _, _, norms = in_micro_batches(two, 4, noise_scale=True)(params, batch)
    small = of_rows(first_rows, params, batch, slice(None))
    assert_norms(norms, small, 4, of_rows(total, params, batch, slice(None)), 11)


def test_norms_come_last_and_gradients_of_rows_are_no_part_of_them():
    params, (x, y) = network(), rows(11)

    def loss_fn(params, batch, state):
        return squared_error(params, (batch, y[: len(batch)] * 0)), (state + 1, batch[:, 0])

    keywords = {"argnums": (0, 1), "has_aux": True, "state_argnum": 2, "noise_scale": True}
    value, grads, norms = in_micro_batches(loss_fn, 4, **keywords)(params, x, 0)
    _, (state, aux) = value
    assert (int(state), aux.shape) == (3, (11,))
    zeros = x, jnp.zeros_like(y)
    assert_norms(
        norms, of_rows(squared_error, params, zeros, slice(4)), 4, of_rows(squared_error, params, zeros, slice(11)), 11
    )
    again = jax.jit(gradaccum.jax.grad(loss_fn, micro_batch_size=4, **keywords))(params, x, 0)
    assert tree_error(again, (grads, (state, aux), norms)) <= FLOAT64
    assert len(jax.jit(gradaccum.jax.grad(slope, micro_batch_size=2, noise_scale=True))(jnp.ones(5), x)) == 2


def test_where_only_rows_are_differentiated_there_is_nothing_to_measure():
    for size in (2, 11):
        with pytest.raises(ValueError, match="noise_scale=True measures gradients that are summed over rows"):
            in_micro_batches(slope, size, argnums=1, noise_scale=True)(jnp.ones(5), rows(11)[0])


def test_on_explicit_axes_each_device_measures_a_micro_batch_of_its_own():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    params, batch = network(), (*rows(32), np.ones(32))
    batch[2][:8] = 0  # all of the first device's: three measure
    batch[2][8:14] = 0  # and two micro-batches of the second: 3 3 2
    step = in_micro_batches(masked, 12, weight=lambda batch: batch[2].sum(), noise_scale=True)
    args = jax.device_put((params, batch), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
    *found, norms = step(*args)
    assert tree_error(tuple(found), at_once(masked)(params, batch)) <= FLOAT64
    measured = [slice(14, 16), slice(16, 19), slice(24, 27)]
    small, size = np.mean([of_rows(masked, params, batch, part) for part in measured]), 3 / (1 / 2 + 1 / 3 + 1 / 3)
    assert_norms(norms, small, size, of_rows(masked, params, batch, slice(None)), 32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_the_norms_are_those_of_the_devices_own_rows(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size=3, noise_scale=True)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    def step(params, batch):
        return jax.lax.pmean(grad_fn(params, batch)[2], "data")

    params, batch = network(), rows(32)
    small = np.mean([of_rows(squared_error, params, batch, slice(start, start + 3)) for start in range(0, 32, 8)])
    large = np.mean([of_rows(squared_error, params, batch, slice(start, start + 8)) for start in range(0, 32, 8)])
    assert_norms(step(params, batch), small, 3, large, 8)


def test_before_there_are_two_updates_nothing_is_known():
    assert math.isnan(gradaccum.jax.noise_scale([]).value)
    norms = in_micro_batches(slope, 2, noise_scale=True)(jnp.zeros(10), draws(1)[0])[2]
    assert math.isnan(gradaccum.jax.noise_scale(norms).value)
