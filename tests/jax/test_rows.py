"""The rows of micro-batches: each row once, in order, spread over devices where there are some."""

import jax
import jax.numpy as jnp
import pytest

from gradaccum.jax.batch import Batch


@pytest.mark.parametrize(
    ("rows", "size", "devices", "axis"),
    [
        *((rows, size, devices, 0) for rows, size in ((7, 3), (12, 4), (12, 100)) for devices in (1, 2)),
        *((1, 1, 1, 0), (7, 3, 1, 1), (12, 4, 2, 1), (30, 7, 6, 0)),
        *(
            pytest.param(rows, size, devices, axis, marks=pytest.mark.slow)
            for rows, size in ((1, 1), (7, 3), (12, 4), (12, 100), (30, 7))
            for devices in (1, 2, 6)
            for axis in (0, 1)
        ),
    ],
)
def test_micro_batches_are_joined_to_the_batch(rows, size, devices, axis):
    shape = (rows, 2) if axis == 0 else (2, rows)
    x = jnp.arange(2 * rows).reshape(shape)
    batch = Batch(({"x": x},), (axis,), ("batch",))
    batch.devices = devices
    groups = batch.groups(size)
    assert len(groups) <= 2
    assert all(group.size <= size for group in groups)
    assert sum(group.size * group.count for group in groups) == rows
    parts = [jnp.stack([batch.micro_batch(g, i)[0]["x"] for i in range(g.count)]) for g in groups]
    assert (batch.joined(parts, axis) == x).all()


def test_on_one_device_a_micro_batch_is_a_slice():
    batch = Batch((jnp.arange(11),), (0,), ("batch",))
    found = [batch.micro_batch(g, i)[0].tolist() for g in batch.groups(4) for i in range(g.count)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_on_several_devices_a_micro_batch_has_the_same_rows_of_each():
    batch = Batch((jnp.arange(12),), (0,), ("batch",))
    batch.devices = 2
    found = [batch.micro_batch(g, i)[0].tolist() for g in batch.groups(4) for i in range(g.count)]
    assert found == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_the_sizes_of_all_leaves_are_compared_at_the_axes_of_each():
    batch = Batch(({"x": jnp.ones((3, 7)), "y": jnp.ones(7), "z": 3.0},), ({"x": -1, "y": 0, "z": None},), ("batch",))
    assert (batch.rows, batch.axes) == (7, [1, 0, None])
    with pytest.raises(ValueError, match="different numbers of rows"):
        Batch(({"x": jnp.ones((3, 7)), "y": jnp.ones(7)},), ({"x": 0, "y": 0},), ("batch",))


def test_shapes_are_enough():
    batch = Batch((jax.ShapeDtypeStruct((8, 2), jnp.float32),), (0,), ("batch",))
    assert (batch.rows, batch.devices) == (8, 1)
