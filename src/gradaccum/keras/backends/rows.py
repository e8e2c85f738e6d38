"""What has rows, what the rows of a tensor are, and the scope that keeps what a function assigns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from gradaccum.keras.private import keras_mask

__all__ = [
    "PARTS",
    "RestartWindow",
    "Result",
    "Scope",
    "Spec",
    "assign",
    "discarded",
    "has_rows",
    "leaves_with_rows",
    "listing",
    "rows_of",
    "unpack",
    "values_of",
]


PARTS = ("x", "y", "sample_weight")
"""Of what `fit` gives a training step."""


def has_rows(leaf: Any) -> bool:
    """Whether this leaf of a batch has rows. Scalars and None are what all rows share."""
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


@dataclass(frozen=True)
class Spec:
    """A tensor of a micro-batch: its dtype, the shape of a row (None: not known), and whether it has a mask."""

    dtype: str
    row: tuple[int | None, ...] | None
    masked: bool = False

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """That of a tensor; of a scalar, `row` is None."""
        shape = tuple(tensor.shape)
        masked = keras_mask(tensor) is not None
        return cls(keras.backend.standardize_dtype(tensor.dtype), shape[1:] if shape else None, masked)


class Result(NamedTuple):
    """What a chunked layer's call on a micro-batch gives.

    Attributes:
        outputs: The tensors in its outputs, and their masks.
        values: Of the variables that the call moves, after it.
        valid: How many values the masks of BatchNormalization layers let through.
    """

    outputs: list[Any]
    values: list[Any]
    valid: dict[int, Any]


class RestartWindow(Exception):  # no error: the window runs again
    """The window has to begin again."""


class Scope(keras.StatelessScope):
    """Keeps what is assigned to itself; what it doesn't hold is read from the scope around it."""

    def __init__(self, values: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping = {id(variable): value for variable, value in values}
        self.read: dict[int, Any] = {}
        self.assigned: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        self.read[id(variable)] = variable
        return None if self.original_scope is None else self.original_scope.get_current_value(variable)

    def add_update(self, update: Any) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def discarded(model: Any) -> Scope:
    """A scope in which a model moves nothing but what the scope forgets."""
    return Scope(zip(model.trainable_variables, values_of(model.trainable_variables)))


def values_of(variables: Iterable[Any]) -> list[Any]:
    """The values of variables, as a scope or they themselves have them."""
    return [variable.value for variable in variables]


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Give variables these values."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def leaves_with_rows(data: Any, parts: Sequence[str] = PARTS) -> list[tuple[str, Any]]:
    """The arrays in what `fit` gives a training step, each with its path in the words of an error."""
    found = []
    for name, part in zip(PARTS, keras.utils.unpack_x_y_sample_weight(data)):
        for path, leaf in keras.tree.flatten_with_path(part) if name in parts else ():
            if has_rows(leaf):
                found.append((name + "".join(f"[{key!r}]" for key in path), leaf))
    return found


def listing(leaves: Sequence[tuple[str, Any]]) -> str:
    """These paths with their shapes, a line each, for an error."""
    return "".join(f"\n  {path}  shape {tuple(leaf.shape)}" for path, leaf in leaves)


def rows_of(data: Any) -> int | None:
    """The rows of a batch; None where the backend doesn't know them while it traces."""
    found = leaves_with_rows(data)
    rows = {leaf.shape[0] for _, leaf in found} - {None}
    if len(rows) > 1 or not found or rows == {0}:
        raise ValueError(
            "A batch is cut into micro-batches along the first dimension of its arrays, which must be the same number "
            f"of rows, at least one. Received:{listing(found) or ' no array that has a dimension.'}"
        )
    return rows.pop() if rows else None


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """`x, y, sample_weight` of what `fit` hands to a training step."""
    return keras.utils.unpack_x_y_sample_weight(data)
