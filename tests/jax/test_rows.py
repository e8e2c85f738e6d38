"""The rows of micro-batches: each row once, in order, spread over devices where there are some."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from gradaccum.jax.batch import Batch

CASES = [(7, 3, 1, 0), (7, 3, 2, 0), (12, 4, 1, 0), (12, 4, 2, 0), (12, 100, 1, 0), (12, 100, 2, 0), (1, 1, 1, 0)]
CASES += [(7, 3, 1, 1), (12, 4, 2, 1), (30, 7, 6, 0)]
SIZES = [(1, 1), (7, 3), (12, 4), (12, 100), (30, 7)]
MORE = [(*sizes, devices, axis) for sizes, devices, axis in itertools.product(SIZES, (1, 2, 6), (0, 1))]


@pytest.mark.parametrize(
    ("rows", "size", "devices", "axis"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
)
def test_micro_batches_are_joined_to_the_batch(rows, size, devices, axis):
    x = jnp.arange(2 * rows).reshape((rows, 2) if axis == 0 else (2, rows))
    batch = Batch(({"x": x},), (axis,), ("batch",))
    batch.devices = devices
    groups = batch.groups(size)
    assert len(groups) <= 2
    assert all(group.size <= size for group in groups)
    assert sum(group.size * group.count for group in groups) == rows
    parts = [jnp.stack([batch.micro_batch(g, i)[0]["x"] for i in range(g.count)]) for g in groups]
    assert (batch.joined(parts, axis) == x).all()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(1, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]), (2, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]])],
    ids=["a slice", "the same rows of each device"],
)
def test_a_micro_batch_is(devices, expected):
    batch = Batch((jnp.arange(12),), (0,), ("batch",))
    batch.devices = devices
    assert [batch.micro_batch(g, i)[0].tolist() for g in batch.groups(4) for i in range(g.count)] == expected


def test_the_sizes_of_all_leaves_are_compared_at_the_axes_of_each():
    leaves = {"x": jnp.ones((3, 7)), "y": jnp.ones(7), "z": 3.0}
    batch = Batch((leaves,), ({"x": -1, "y": 0, "z": None},), ("batch",))
    assert (batch.rows, batch.axes) == (7, [1, 0, None])
    with pytest.raises(ValueError, match="different numbers of rows"):
        Batch((leaves,), ({"x": 0, "y": 0, "z": None},), ("batch",))


def test_shapes_are_enough():
    batch = Batch((jax.ShapeDtypeStruct((8, 2), jnp.float32),), (0,), ("batch",))
    assert (batch.rows, batch.devices) == (8, 1)
