"""What has rows, and what the rows of a tensor are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from gradaccum.keras.private import keras_mask

__all__ = ["Spec", "has_rows"]


def has_rows(leaf: Any) -> bool:
    """Whether this leaf of a batch has rows. Scalars and None are what all rows share."""
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


@dataclass(frozen=True)
class Spec:
    """A tensor of a micro-batch: its dtype, the shape of a row (None: not known), and whether it has a mask."""

    dtype: str
    row: tuple[int | None, ...] | None
    masked: bool

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """That of a tensor; of a scalar, `row` is None."""
        shape = tuple(tensor.shape)
        masked = keras_mask(tensor) is not None
        return cls(keras.backend.standardize_dtype(tensor.dtype), shape[1:] if shape else None, masked)
