"""A batch in micro-batches on JAX: stacked, for a `lax.scan` over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import tree

from gradaccum.keras.loops.rows import has_rows
from gradaccum.on_jax import scan

__all__ = ["by_device", "devices_of", "first", "joined", "like", "loop", "stacks"]


def devices_of(rows: int) -> int:
    """How many devices a batch of so many rows is spread over, in equal parts."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    mesh = distribution.device_mesh
    count = int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])
    return count if rows % count == 0 else 1


def stacks(data: Any, sizes: list[int], devices: int = 1, start: int = 0) -> list[tuple[int, Any]]:
    """The batch as `(size, micro-batches stacked along a new first dimension)`, for each distinct size.

    Args:
        data: The batch.
        sizes: Of micro-batches, in rows of each device.
        devices: On which equal parts of the batch lie.
        start: The first row, of each device.
    """
    found = []
    for size in sorted(set(sizes), reverse=True):
        count = sizes.count(size)
        stop = start + count * size

        def stacked(leaf: Any, start: int = start, stop: int = stop, shape: tuple[int, int] = (count, size)) -> Any:
            if not has_rows(leaf):
                return None if leaf is None else jnp.broadcast_to(leaf, (shape[0], *jnp.shape(leaf)))
            rest = leaf.shape[1:]
            parts = leaf.reshape(devices, -1, *rest)[:, start:stop].reshape(devices, *shape, *rest)
            return parts.swapaxes(0, 1).reshape(shape[0], devices * shape[1], *rest)

        found.append((devices * size, tree.map_structure(stacked, data)))
        start = stop
    return found


def by_device(stacked: Any, devices: int) -> Any:
    """Outputs of the micro-batches, stacked, as `(device, its rows, ...)`."""
    count, rest = stacked.shape[0], stacked.shape[2:]
    return stacked.reshape(count, devices, -1, *rest).swapaxes(0, 1).reshape(devices, -1, *rest)


def loop(body: Callable[[Any, Any], Any], carry: Any, micro_batches: Any) -> tuple[Any, Any]:
    """`lax.scan`, without a loop where there is but one micro-batch."""
    if jax.tree.leaves(micro_batches)[0].shape[0] > 1:
        return scan(body, carry, micro_batches)
    carry, output = body(carry, tree.map_structure(first, micro_batches))
    return carry, jax.tree.map(lambda a: a[None], output)


def first(leaf: Any) -> Any:
    return None if leaf is None else leaf[0]


def joined(*parts: Any) -> Any:
    """Outputs by device, in the order of the batch."""
    return jnp.concatenate(parts, 1).reshape(-1, *parts[0].shape[2:])


def like(values: Any, reference: Any) -> Any:
    """`values` in the dtypes of `reference`, as a loop's carry must be."""
    return jax.tree.map(lambda value, like: jnp.asarray(value, like.dtype), values, reference)
