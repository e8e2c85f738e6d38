"""What a contrastive loss of arrays is called with: checked alike, whatever framework the arrays are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Described", "check_pairs"]


class Described(NamedTuple):
    """Of an array, what its framework says."""

    dtype: str
    shape: tuple[int | None, ...]
    """None: a dimension that isn't known yet."""

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.startswith(("float", "bfloat"))

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def check_pairs(
    a: Any,
    b: Any,
    temperature: Any,
    positives: Any,
    describe: Callable[[Any], Described | None],
    array: str = "an array",
    framework: str = "",
    floats: str = "",
) -> None:
    """Rows of two sides, what their scores are divided by, and which of them belong together."""
    sides = []
    for name, rows in (("a", a), ("b", b)):
        found = describe(rows)
        if found is None:
            must = f"`{name}` must be {array}{framework and f' of {framework}'}"
            raise TypeError(f"{must}. Received: {rows!r} of type {type(rows).__name__}.")
        if len(found.shape) != 2 or 0 in found.shape or not found.is_floating:
            raise ValueError(f"`{name}` must be {array} of floats, of shape (rows, size). Received: {found}.")
        sides.append(found.shape)
    (rows, size), (columns, other) = sides
    if None not in (size, other) and size != other:
        raise ValueError(f"`a` and `b` must have rows of the same size. Received: {sides[0]} and {sides[1]}.")
    _check_temperature(temperature, describe(temperature), array)
    if isinstance(positives, tuple) and len(positives) == 2:
        _check_ids(positives, [*zip(map(describe, positives), (rows, columns), strict=True)], array, floats)
        return
    if positives is not None:
        _check_ids(positives, [(describe(positives), rows)], array, floats)
    if rows is not None and columns is not None and columns < rows:
        raise ValueError(
            "Row i of a and row i of b are a pair, so b has as many rows as a, or more: negatives. Received: "
            f"{rows} rows of a, {columns} of b. Swap them, or pass a tuple of ids of a's and of b's rows."
        )


def _check_ids(positives: Any, sides: Sequence[tuple[Described | None, int | None]], array: str, floats: str) -> None:
    for found, rows in sides:
        if found is not None and found.is_floating:
            raise TypeError(
                f"`positives` must be {array} of ids, which are integers. Received: {found}. {floats}".strip()
            )
        if found is None or "int" not in found.dtype:
            raise TypeError(
                f"`positives` must be {array} of ids, or a tuple of two (of a's rows, of b's). Received: {positives!r}."
            )
        if len(found.shape) != 1 or (None not in (found.shape[0], rows) and found.shape[0] != rows):
            raise ValueError(f"`positives` must have an id for each row, ({rows},). Received: {found.shape}.")


def _check_temperature(value: Any, found: Described | None, array: str) -> None:
    must = f"`temperature` must be a positive number, or {array} that holds one"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not value > 0:
            raise ValueError(f"{must}. Received: temperature={value!r}.")
    elif found is None:
        raise TypeError(f"{must}. Received: temperature={value!r} of type {type(value).__name__}.")
    elif any(size != 1 for size in found.shape) or not found.is_floating:
        raise ValueError(f"{must}. Received: {found}.")
