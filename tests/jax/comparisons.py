"""What plain JAX makes of a whole batch, the naive oracle, beside what micro-batches make of it; and devices."""

import functools

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from tests.reference import FLOAT64, relative_error

DATA = P("data")


def tree_error(actual, expected):
    """`relative_error` over the leaves of two pytrees of the same structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    return relative_error(jax.tree.leaves(actual), jax.tree.leaves(expected))


def assert_same(actual, expected, within=FLOAT64):
    assert tree_error(actual, expected) <= within


def assert_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


@functools.cache
def at_once(loss_fn, **keywords):
    """The large batch's loss and gradients: the oracle, compiled once for each function and its batches' shapes."""
    return jax.jit(jax.value_and_grad(loss_fn, **keywords))


def in_micro_batches(loss_fn, micro_batch_size, **keywords):
    """The same in micro-batches."""
    return jax.jit(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=micro_batch_size, **keywords))


def assert_large_batch(loss_fn, size, *args, within=FLOAT64, **options):
    """In micro-batches of that size, loss and gradients are those of plain JAX on the whole batch."""
    plain = at_once(loss_fn, **{name: options[name] for name in ("argnums", "has_aux") if name in options})
    assert_same(in_micro_batches(loss_fn, size, **options)(*args), plain(*args), within)


def mesh_of(kind, shape=(4,), names=("data",)):
    """Devices, with "Explicit" or "Auto" axes."""
    return jax.make_mesh(shape, names, axis_types=(AxisType[kind],) * len(shape))


def placed(tree, mesh, spec=DATA):
    return jax.device_put(tree, NamedSharding(mesh, spec))
