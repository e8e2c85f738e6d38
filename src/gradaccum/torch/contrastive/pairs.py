"""Which pairs of rows are meant, asked for a tile of the matrix of all pairs at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradaccum.torch.contrastive.ranks import SingleProcess

__all__ = ["Pairs", "PairsOf", "checked_pairs", "pairs_of"]

PairsOf = Tensor | tuple[Tensor, Tensor] | Callable[[Tensor, Tensor], Tensor]
"""What users give: ids of the rows, ids of `a`'s and of `b`'s rows, or a function of numbers of rows."""

NO_ID = torch.iinfo(torch.int64).min


class Pairs:
    """Rows of `a` and of `b` that have the same number on the same rank."""

    def __init__(self, exchange: SingleProcess) -> None:
        self.exchange = exchange

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        """Of each pair of a tile whether it is meant; None where none is.

        Args:
            rows: Of this rank's `a`.
            columns: Of all ranks' `b`.
        """
        first = self.exchange.starts[self.exchange.rank]
        begin, end = max(first + rows.start, columns.start), min(first + rows.stop, columns.stop)
        if begin >= end:
            return None
        device = self.exchange.device
        numbers = torch.arange(first + rows.start, first + rows.stop, device=device)
        return numbers[:, None] == torch.arange(columns.start, columns.stop, device=device)


class SameIds(Pairs):
    """Rows with the same id."""

    def __init__(self, exchange: SingleProcess, of_a: Tensor, of_b: Tensor) -> None:
        super().__init__(exchange)
        self.of_a = of_a.to(exchange.device, torch.int64)
        extra = exchange.columns[exchange.rank] - len(of_b)  # negatives of every row
        of_b = of_b.to(exchange.device, torch.int64)
        self.of_b = exchange.gathered(torch.cat([of_b, of_b.new_full((extra,), NO_ID)]))

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        return self.of_a[rows, None] == self.of_b[columns]


class ByFunction(Pairs):
    """Pairs for which a function of their numbers is true."""

    def __init__(self, exchange: SingleProcess, function: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
        super().__init__(exchange)
        self.function, self.name = function, name
        self.before = sum(exchange.rows[: exchange.rank])

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        device = self.exchange.device
        numbers = torch.arange(rows.start, rows.stop, device=device) + self.before
        with torch.no_grad():
            found = self.function(numbers, torch.arange(columns.start, columns.stop, device=device))
        expected = (rows.stop - rows.start, columns.stop - columns.start)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or tuple(found.shape) != expected:
            received = f"{found.dtype}, shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(
                f"`{self.name}(rows, columns)` must return a bool tensor of shape (len(rows), len(columns)), here "
                f"{expected}. Received: {received}."
            )
        return found.to(device)


def checked_pairs(given: Any, name: str, rows: int, columns: int) -> int:
    """Check what `positives` or `ignore` was given as; returns a number for its kind.

    Raises:
        TypeError, ValueError: It is none of what it must be.
    """
    if given is None:
        return 0
    if callable(given):
        return 1
    both = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(both[0], Tensor) or not (both[1] is None or isinstance(both[1], Tensor)):
        raise TypeError(
            f"`{name}` must be a tensor of ids, a tuple of two (of a's rows, of b's), or a function (rows, columns) -> "
            f"bool tensor. Received: {name}={given!r} of type {type(given).__name__}."
        )
    of_a, of_b = both
    for ids in (of_a,) if of_b is None else (of_a, of_b):
        if ids.dtype in (torch.bool, torch.uint64) or ids.is_floating_point() or ids.is_complex() or ids.dim() != 1:
            raise ValueError(
                f"`{name}` as a tensor holds an id (an int) for each row. Received: {ids.dtype}, shape "
                f"{tuple(ids.shape)}. A matrix of pairs takes memory that is quadratic in the rows; one that is at "
                f"hand is given as {name}=lambda rows, columns: matrix[rows][:, columns]."
            )
    if of_b is None and columns < rows:
        raise ValueError(
            f"`{name}` as one tensor holds ids of the pairs, of which b has fewer rows than a ({columns} and {rows}). "
            f"Give the ids of both: {name}=(ids_of_a, ids_of_b)."
        )
    if len(of_a) != rows or (of_b is not None and len(of_b) != columns):
        lengths = len(of_a) if of_b is None else (len(of_a), len(of_b))
        raise ValueError(f"`{name}` must have an id for each row, {(rows, columns)} of a and b. Received: {lengths}.")
    return 2


def pairs_of(given: PairsOf, name: str, exchange: SingleProcess) -> Pairs:
    """The pairs that were given, checked."""
    if isinstance(given, tuple):
        return SameIds(exchange, *given)
    if isinstance(given, Tensor):
        return SameIds(exchange, given, given)
    return ByFunction(exchange, given, name)
