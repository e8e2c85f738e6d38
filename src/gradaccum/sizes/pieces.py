"""The pieces that a large batch is cut into, as rows and columns; nothing is copied before its turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradaccum.schedule import checked_count
from gradaccum.sizes.even import FixedSize, even_sizes, packed
from gradaccum.sizes.search import SizeSearch

__all__ = ["GivenSizes", "Piece", "Rows", "Sizer", "TokenBudget", "Tokens"]

Sizer = SizeSearch | FixedSize


class Piece(NamedTuple):
    """One micro-batch: which rows, and up to which columns where rows are padded.

    Example:
        >>> [piece.rows for piece in Piece(slice(4, 14)).split(4)]
        [slice(4, 8, None), slice(8, 11, None), slice(11, 14, None)]
    """

    rows: slice | list[int]
    columns: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Its number of rows."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def tokens(self) -> int:
        """Rows times columns; its rows where there are no columns."""
        return self.size * (self.columns[1] - self.columns[0] if self.columns is not None else 1)

    def split(self, size: int) -> list[Piece]:
        """Pieces of at most `size` rows, as even as can be."""
        pieces, start = [], 0
        for length in even_sizes(self.size, size):
            if isinstance(self.rows, slice):
                first = self.rows.start + start
                pieces.append(Piece(slice(first, first + length), self.columns))
            else:
                pieces.append(Piece(self.rows[start : start + length], self.columns))
            start += length
        return pieces


class Rows:
    """A batch cut by rows."""

    def __init__(self, sizer: Sizer, rows: int) -> None:
        self.sizer = sizer
        self.rows = rows

    @property
    def measuring(self) -> bool:
        """Whether somebody wants to know what micro-batches cost."""
        return not self.sizer.settled

    def __iter__(self) -> Iterator[Piece]:
        start, size = 0, self.sizer.size
        if self.sizer.settled and self.rows:
            for piece in _even(self.rows, size):
                if self.sizer.size != size:  # that was too much
                    break
                yield piece
                start = piece.rows.stop  # type: ignore[union-attr]  # rows of a whole batch are a slice
        while start < self.rows:
            size = self.sizer.next_size(self.rows - start)
            yield Piece(slice(start, start + size))
            start += size

    def record(self, piece: Piece, seconds: float, base: float, peak: float) -> None:
        """A micro-batch took so long, and so many bytes at its peak over `base` before it."""
        self.sizer.record(piece.size, seconds, base, peak)

    @property
    def lowered(self) -> bool:
        """Whether micro-batches are smaller than they were, since some ran out of memory."""
        return self.sizer.ceiling is not None and self.rows > 1

    def failed_before(self, piece: Piece) -> bool:
        """Whether a piece of this size was already known not to fit."""
        return self.sizer.ceiling is not None and piece.size > self.sizer.ceiling

    def failed(self, piece: Piece) -> list[Piece]:
        """This piece ran out of memory; returns smaller ones."""
        self.sizer.failed(piece.size)
        return piece.split(min(self.sizer.size, piece.size - 1))

    def refused(self) -> bool:
        """One row alone can't be evaluated: two are the fewest from here on. Returns whether that is news."""
        size, self.sizer.size = self.sizer.size, max(self.sizer.size, 2)
        return size < 2

    def fitting(self, piece: Piece) -> list[Piece]:
        """The piece, or smaller ones where a smaller size has failed meanwhile."""
        ceiling = self.sizer.ceiling or piece.size
        return piece.split(piece.size if piece.size <= ceiling else min(self.sizer.size, ceiling))


class GivenSizes(Rows):
    """A batch cut into pieces of given sizes.

    Example:
        >>> [piece.rows for piece in GivenSizes([3, 1])]
        [slice(0, 3, None), slice(3, 4, None)]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(FixedSize(max(sizes)), sum(sizes))
        self.sizes = sizes

    def __iter__(self) -> Iterator[Piece]:
        start = 0
        for size in self.sizes:
            yield Piece(slice(start, start + size))
            start += size


@functools.lru_cache(maxsize=64)
def _even(rows: int, size: int) -> list[Piece]:
    return Piece(slice(0, rows)).split(size)


class TokenBudget:
    """The padded tokens that a micro-batch may have: what somebody chose, lowered where it turns out not to fit."""

    def __init__(self, max_tokens: int, max_rows: int | None = None) -> None:
        self.max_tokens = checked_count(max_tokens, "max_tokens")
        self.max_rows = max_rows
        self.lowered = False
        """Whether it is less than was chosen."""


class Tokens:
    """A batch of padded rows, packed by a budget of tokens.

    Args:
        budget: How many.
        extents: Of each row the column where its tokens begin, and the one after the last.
        sizes: Rows of the micro-batches, in order; None: as many as the budget allows.
    """

    measuring = False

    def __init__(self, budget: TokenBudget, extents: list[tuple[int, int]], sizes: Sequence[int] | None = None) -> None:
        self.budget = budget
        packs = packed(extents, budget.max_tokens, budget.max_rows)
        if sizes is not None:
            order = iter([row for rows, _, _ in packs for row in rows])
            cut = [list(itertools.islice(order, size)) for size in sizes]
            packs = [(rows, min(extents[r][0] for r in rows), max(extents[r][1] for r in rows)) for rows in cut]
        self.pieces = [Piece(rows, (start, stop)) for rows, start, stop in packs]

    def __iter__(self) -> Iterator[Piece]:
        for piece in self.pieces:
            yield from self.fitting(piece)

    def record(self, piece: Piece, seconds: float, base: float, peak: float) -> None:
        """Nothing to learn."""

    @property
    def lowered(self) -> bool:
        """Whether micro-batches are smaller than they were, since some ran out of memory."""
        return self.budget.lowered

    def failed_before(self, piece: Piece) -> bool:
        """Whether a piece of this size was already known not to fit."""
        return piece.tokens > self.budget.max_tokens

    def failed(self, piece: Piece) -> list[Piece]:
        """This piece ran out of memory; returns smaller ones."""
        self.budget.lowered = True
        self.budget.max_tokens = max(min(self.budget.max_tokens, piece.tokens // 2), 1)
        return piece.split(-(-piece.size // 2))

    def refused(self) -> bool:
        """One row alone can't be evaluated, which is no news for other rows."""
        return False

    def fitting(self, piece: Piece) -> list[Piece]:
        """The piece, or smaller ones where the budget has been lowered since it was packed."""
        if piece.tokens <= self.budget.max_tokens:
            return [piece]
        return piece.split(max(self.budget.max_tokens * piece.size // piece.tokens, 1))
