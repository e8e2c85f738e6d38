"""The batches that `fit` hands to a training step."""

from __future__ import annotations

from typing import Any

import keras
from keras import tree

__all__ = ["has_rows", "rows_of", "unpack"]


def rows_of(data: Any) -> int | None:
    """The rows of a batch; None where the backend doesn't know them while it traces.

    Raises:
        ValueError: The arrays of the batch have different numbers of rows, or there is none with rows.
    """
    found = [(path, leaf) for path, leaf in tree.flatten_with_path(data) if has_rows(leaf)]
    rows = {leaf.shape[0] for _, leaf in found} - {None}
    if len(rows) > 1 or not found or rows == {0}:
        names = ("x", "y", "sample_weight")
        listing = "".join(
            f"\n  {names[path[0]]}{''.join(f'[{key!r}]' for key in path[1:])}  shape {tuple(leaf.shape)}"
            for path, leaf in found
        )
        raise ValueError(
            "A batch is cut into micro-batches along the first dimension of its arrays, which must be the same number "
            f"of rows, at least one. Received:{listing or ' no array that has a dimension.'}"
        )
    return rows.pop() if rows else None


def has_rows(leaf: Any) -> bool:
    """Whether this leaf of a batch is cut. Scalars and None are what all micro-batches share."""
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """`x, y, sample_weight` of what `fit` hands to a training step."""
    return keras.utils.unpack_x_y_sample_weight(data)
