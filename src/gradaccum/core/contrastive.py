"""What a contrastive loss of arrays is called with: checked alike, whatever framework the arrays are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Described(NamedTuple):
    """Of an array, what its framework says."""

    dtype: str
    shape: tuple[int | None, ...]
    """None: a dimension that isn't known yet."""
    number: float | None = None
    """What it holds, if that is one number that can be read without waiting."""

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.startswith(("float", "bfloat"))

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


Describe = Callable[[Any], Described | None]


def check_pairs(
    a: Any,
    b: Any,
    temperature: Any,
    positives: Any,
    describe: Describe,
    array: str = "an array",
    framework: str = "",
    floats: str = "",
) -> None:
    """Rows of two sides, what their scores are divided by, and which of them belong together."""
    rows, columns = check_rows(a, b, describe, array, framework)
    check_scalar(temperature, "temperature", describe, array)
    check_ids(positives, "positives", rows, columns, describe, array, floats)


def check_rows(
    a: Any, b: Any, describe: Describe, array: str, framework: str = "", *, may_be_empty: bool = False
) -> tuple[int | None, int | None]:
    """The numbers of rows."""
    sides = []
    for name, rows in (("a", a), ("b", b)):
        found = describe(rows)
        if found is None:
            must = f"`{name}` must be {array}{framework and f' of {framework}'}"
            raise TypeError(f"{must}. Received: {rows!r} of type {type(rows).__name__}.")
        if len(found.shape) != 2 or not found.is_floating or (0 in found.shape and not may_be_empty):
            raise ValueError(f"`{name}` must be {array} of floats, of shape (rows, size). Received: {found}.")
        sides.append(found.shape)
    (rows, size), (columns, other) = sides
    if None not in (size, other) and size != other:
        raise ValueError(f"`a` and `b` must have rows of the same size. Received: {sides[0]} and {sides[1]}.")
    return rows, columns


def check_ids(
    given: Any,
    name: str,
    rows: int | None,
    columns: int | None,
    describe: Describe,
    array: str,
    floats: str = "",
    *,
    functions: bool = False,
) -> int:
    """Which pairs are meant: 2 by ids, 1 by a function, where that is possible, 0 where nothing is given."""
    if functions and callable(given):
        return 1
    is_pair = isinstance(given, tuple) and len(given) == 2
    sides = [] if given is None else [*zip(given, (rows, columns))] if is_pair else [(given, rows)]
    for ids, count in sides:
        found = describe(ids)
        if found is None or "int" not in found.dtype:
            raise TypeError(_ids_message(given, found, name, array, floats, functions))
        if len(found.shape) != 1 or (None not in (found.shape[0], count) and found.shape[0] != count):
            raise ValueError(f"`{name}` must have an id for each row, ({count},). Received: {found.shape}.")
    if (given is not None or name == "positives") and not is_pair:
        _check_paired(rows, columns, name)
    return 0 if given is None else 2


def _ids_message(given: Any, found: Described | None, name: str, array: str, floats: str, functions: bool) -> str:
    if functions and found is not None and len(found.shape) == 2:
        floats = f"Pass a matrix that you have as {name}=lambda rows, columns: matrix[rows][:, columns]."
    if found is not None:
        return f"`{name}` must be {array} of ids, which are integers. Received: {found}. {floats}".strip()
    function = ", or a function (rows, columns) -> bool tensor" if functions else ""
    must = f"`{name}` must be {array} of ids, or a tuple of two (of a's rows, of b's){function}"
    return f"{must}. Received: {name}={given!r} of type {type(given).__name__}."


def _check_paired(rows: int | None, columns: int | None, name: str) -> None:
    if rows is not None and columns is not None and columns < rows:
        raise ValueError(
            "Row i of a and row i of b are a pair, so b must have at least as many rows as a. Received: "
            f"{rows} rows of a, {columns} of b. Swap them, or pass {name}=(ids_of_a, ids_of_b)."
        )


def check_scalar(value: Any, name: str, describe: Describe, array: str, *, positive: bool = True) -> None:
    """A number, or an array of one element; the NaN of an array passes, as it may have been learned."""
    must = f"`{name}` must be a{' positive' if positive else ''} number, or {array} that holds one"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not (value > 0 if positive else value == value):
            raise ValueError(f"{must}. Received: {name}={value!r}.")
        return
    found = describe(value)
    if found is None:
        raise TypeError(f"{must}. Received: {name}={value!r} of type {type(value).__name__}.")
    if any(size != 1 for size in found.shape) or not found.is_floating:
        raise ValueError(f"{must}. Received: {found}.")
    if positive and found.number is not None and found.number <= 0:
        raise ValueError(f"{must}. Received: {name}={found.number!r}.")
