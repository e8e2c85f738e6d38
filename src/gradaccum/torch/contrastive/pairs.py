"""Which pairs of rows are meant, asked for a tile of the matrix of all pairs at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.random_state import RandomState, all_generators, kept
from gradaccum.torch.contrastive.ranks import SingleProcess

__all__ = ["Answers", "Pairs", "PairsOf", "checked_pairs", "pairs_of"]

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
        # A copy, as backward looks at them again, whatever has become of the user's tensor.
        self.of_a = of_a.to(exchange.device, torch.int64, copy=True)
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
        self.digest = torch.zeros(exchange.rows[exchange.rank], dtype=torch.float32, device=exchange.device)
        """Of each row a number that its answers make, over all tiles of a pass."""

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
        found = found.to(device)
        self._digest(rows, columns, found)
        return found

    @torch.no_grad()
    def _digest(self, rows: slice, columns: slice, found: Tensor) -> None:
        number = torch.arange(columns.start, columns.stop, device=found.device)
        weights = (number * 2654435761 // 128 % 2039 + 1).to(self.digest.dtype)
        with torch.autocast(found.device.type, enabled=False):
            self.digest[rows] += found.to(self.digest.dtype) @ weights


class Answers:
    """What functions answer in the first pass over the tiles: backward, which asks again, has to get the same.

    Random numbers of PyTorch's, Python's and NumPy's generators are those of the first pass in every other one.

    Args:
        asked: The pairs of a loss.

    Raises:
        NotEquivalentError: At the end of a pass: a function has answered otherwise than in the first one.
    """

    def __init__(self, *asked: Pairs | None) -> None:
        self.functions = [pairs for pairs in asked if isinstance(pairs, ByFunction)]
        self._random: RandomState | None = None
        self._first: list[Tensor] = []

    @contextlib.contextmanager
    def the_same(self) -> Iterator[None]:
        """Around each pass over all tiles."""
        if not self.functions:
            yield
            return
        for pairs in self.functions:
            pairs.digest = torch.zeros_like(pairs.digest)
        if self._random is None:
            before = RandomState(all_generators([self.functions[0].exchange.device]))
            yield
            self._random = before.only(before.moved())
            self._first = [pairs.digest for pairs in self.functions]
            return
        with kept(self._random.states):
            self._random.put_back()
            yield
        for pairs, first in zip(self.functions, self._first, strict=True):
            if not torch.equal(pairs.digest, first):
                raise NotEquivalentError(
                    f"`{pairs.name}(rows, columns)` answers otherwise when backward asks it again, so the gradient "
                    "would be that of another loss. Does it read something that has changed since, or draw from a "
                    "generator of its own? Draw, or copy what it reads, before the loss is called."
                )


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
