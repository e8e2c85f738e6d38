"""The pieces that a large batch is cut into, as rows and columns; nothing is copied before its turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradaccum.core.sizes.even import FixedSize, even_sizes, packed
from gradaccum.core.sizes.groups import Groups
from gradaccum.core.sizes.search import SizeSearch
from gradaccum.schedule import checked_count

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
    packs: list[list[int]] | None = None
    """Where rows lie one behind the other: the rows of each packed row."""

    @property
    def size(self) -> int:
        """Its number of rows."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def tokens(self) -> int:
        """Rows times columns; its rows where there are no columns."""
        rows = self.size if self.packs is None else len(self.packs)
        return rows * (self.columns[1] - self.columns[0] if self.columns is not None else 1)

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


def _split(piece: Piece, size: int, groups: Groups | None) -> list[Piece]:
    """The piece in smaller ones: of whole groups, where rows belong together."""
    if groups is None:
        return piece.split(size)
    together = isinstance(piece.rows, slice)
    rows = range(piece.rows.start, piece.rows.stop) if isinstance(piece.rows, slice) else piece.rows
    parts = groups.cut(rows, size)
    return [Piece(slice(part[0], part[-1] + 1) if together else part, piece.columns) for part in parts]


def _indivisible(piece: Piece, groups: Groups | None) -> str | None:
    """What to call a piece that cannot be split; None where it can."""
    if groups is None or piece.size == 1:
        return "one row" if piece.size == 1 else None
    ends = [piece.rows.start, piece.rows.stop - 1] if isinstance(piece.rows, slice) else piece.rows
    group = groups.alone(ends)
    return None if group is None else f"{groups.described(group)}, whose rows stay together"


class Rows:
    """A batch cut by rows.

    Args:
        sizer: How many a micro-batch has.
        rows: Those of the batch.
        groups: Which of them stay together.

    Raises:
        ValueError: A group has more rows than a micro-batch may have.
    """

    def __init__(self, sizer: Sizer, rows: int, groups: Groups | None = None) -> None:
        self.sizer = sizer
        self.rows = rows
        self.groups = groups
        self._wanted: dict[int, int] = {}
        if groups is not None and rows and isinstance(sizer, FixedSize) and sizer.ceiling is None:
            group, _, size = groups.largest
            if size > sizer.size:
                raise ValueError(
                    f"A group does not fit into a micro-batch: {groups.described(group)} in micro_batch_size="
                    f"{sizer.size}. Its rows stay together, so give a `micro_batch_size` of {size} or more."
                )

    @property
    def measuring(self) -> bool:
        """Whether somebody wants to know what micro-batches cost."""
        return not self.sizer.settled

    def __iter__(self) -> Iterator[Piece]:
        if self.groups is not None:
            yield from self._in_groups(self.groups)
            return
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

    def _in_groups(self, groups: Groups) -> Iterator[Piece]:
        start = 0
        while start < self.rows:
            wanted = self.sizer.next_size(self.rows - start)
            stop = groups.stop(start, wanted, max(wanted, self.sizer.size) if self.sizer.settled else wanted)
            self._wanted[start] = wanted
            yield Piece(slice(start, stop))
            start = stop

    def record(self, piece: Piece, seconds: float, base: float, peak: float) -> None:
        """A micro-batch took so long, and so many bytes at its peak over `base` before it."""
        assert isinstance(piece.rows, slice)
        wanted = self._wanted.get(piece.rows.start, piece.size)  # whole groups are a few rows more, or less
        part = wanted / piece.size
        self.sizer.record(wanted, seconds * part, base, base + (peak - base) * part)

    def indivisible(self, piece: Piece) -> str | None:
        """What to call a piece that cannot be split; None where it can."""
        return _indivisible(piece, self.groups)

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
        return _split(piece, min(self.sizer.size, piece.size - 1), self.groups)

    @property
    def size(self) -> int:
        """Rows of a micro-batch, at most."""
        return self.sizer.size

    def cost(self, piece: Piece) -> int:
        """What `too_much` is told of a piece that does not fit: its rows."""
        return piece.size

    def too_much(self, cost: int) -> None:
        """A piece of so many rows did not fit somewhere, on another rank perhaps: pieces have half of them, at most."""
        if self.sizer.size > 1 and self.sizer.size > cost // 2:
            self.sizer.failed(cost)

    def in_passes(self, count: int, least: int = 1) -> list[Piece]:
        """The pieces of this batch, `count` of them where there are rows enough; none larger than planned.

        Args:
            count: As many as there are, or more.
            least: The fewest rows of a piece.

        Example:
            >>> [piece.size for piece in Rows(FixedSize(8), 10).in_passes(4)]
            [3, 3, 2, 2]
            >>> [piece.size for piece in Rows(FixedSize(8), 3).in_passes(4)]
            [1, 1, 1]
        """
        pieces = list(self)
        if self.groups is None:
            count = max(min(count, self.rows // least), len(pieces))
            return pieces if count == len(pieces) else _parts(self.rows, count)
        batch = Piece(slice(0, self.rows))
        for size in range(max(-(-self.rows // count), least), self.size):
            smaller = _split(batch, size, self.groups)
            if len(smaller) <= count:
                return smaller
        return pieces

    def refused(self) -> bool:
        """One row alone can't be evaluated: two are the fewest from here on. Returns whether that is news."""
        size, self.sizer.size = self.sizer.size, max(self.sizer.size, 2)
        return size < 2

    def fitting(self, piece: Piece) -> list[Piece]:
        """The piece, or smaller ones where a smaller size has failed meanwhile."""
        ceiling = self.sizer.ceiling or piece.size
        size = piece.size if piece.size <= ceiling else min(self.sizer.size, ceiling)
        return _split(piece, size, self.groups)


class GivenSizes(Rows):
    """A batch cut into pieces of given sizes.

    Example:
        >>> [piece.rows for piece in GivenSizes([3, 1])]
        [slice(0, 3, None), slice(3, 4, None)]
    """

    def __init__(self, sizes: Sequence[int], groups: Groups | None = None) -> None:
        super().__init__(FixedSize(max(sizes)), sum(sizes), groups)
        self.sizes = sizes

    def __iter__(self) -> Iterator[Piece]:
        start = 0
        for size in self.sizes:
            yield Piece(slice(start, start + size))
            start += size


@functools.lru_cache(maxsize=64)
def _even(rows: int, size: int) -> list[Piece]:
    return Piece(slice(0, rows)).split(size)


def _parts(rows: int, count: int) -> list[Piece]:
    """So many pieces, as even as can be."""
    size, larger = divmod(rows, count)
    ends = list(itertools.accumulate([size + 1] * larger + [size] * (count - larger), initial=0))
    return [Piece(slice(start, stop)) for start, stop in itertools.pairwise(ends)]


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
        groups: Which rows stay together.

    Raises:
        ValueError: A group has more padded tokens than a micro-batch may have.
    """

    measuring = False

    def __init__(
        self,
        budget: TokenBudget,
        extents: list[tuple[int, int]],
        sizes: Sequence[int] | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.budget = budget
        self.groups = groups
        self._extents = extents
        self._units = None if groups is None else [list(range(start, start + size)) for _, start, size in groups.runs]
        packs = packed(extents, budget.max_tokens, budget.max_rows, self._units)
        if groups is not None and sizes is None and not budget.lowered:
            self._check(groups, packs)
        if sizes is not None:
            order = [row for rows, _, _ in packs for row in rows]
            if groups is None:
                each = iter(order)
                cut = [list(itertools.islice(each, size)) for size in sizes]
            else:
                cut = groups.cut(order, max(sizes))
            packs = [(rows, min(extents[r][0] for r in rows), max(extents[r][1] for r in rows)) for rows in cut]
        self.pieces = [Piece(rows, (start, stop)) for rows, start, stop in packs]

    def _check(self, groups: Groups, packs: Sequence[tuple[list[int], int, int]]) -> None:
        most, budget = self.budget.max_rows, self.budget.max_tokens
        for rows, start, stop in packs:
            tokens = len(rows) * (stop - start)
            if len(rows) > 1 and (tokens > budget or (most is not None and len(rows) > most)):
                raise ValueError(
                    f"A group does not fit into a micro-batch: {groups.described(groups.ids[rows[0]])} of up to "
                    f"{stop - start} columns, {tokens} padded tokens, in max_tokens={budget}"
                    + (f", micro_batch_size={most}" if most is not None else "")
                    + ". Its rows stay together, so allow for more."
                )

    def indivisible(self, piece: Piece) -> str | None:
        """What to call a piece that cannot be split; None where it can."""
        return _indivisible(piece, self.groups)

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
        self.too_much(piece.tokens)
        return self._halves(piece)

    @property
    def size(self) -> int:
        """Tokens of a micro-batch, at most."""
        return self.budget.max_tokens

    def cost(self, piece: Piece) -> int:
        """What `too_much` is told of a piece that does not fit: its tokens."""
        return piece.tokens

    def too_much(self, cost: int) -> None:
        """A piece of so many tokens did not fit somewhere, on another rank perhaps: pieces have half, at most."""
        self.budget.lowered = True
        self.budget.max_tokens = max(min(self.budget.max_tokens, cost // 2), 1)

    def in_passes(self, count: int, least: int = 1) -> list[Piece]:
        """The pieces of this batch, `count` of them where there are rows enough; none larger than planned.

        Packed by the smallest budget that needs no more, so that the passes of a rank cost about the same.

        Args:
            count: As many as there are, or more.
            least: The fewest rows of a piece.

        Example:
            >>> tokens = Tokens(TokenBudget(40), [(0, 9), (0, 8), (0, 7), (0, 3), (0, 3), (0, 2)])
            >>> [piece.tokens for piece in tokens], [piece.tokens for piece in tokens.in_passes(3)]
            ([36, 6], [18, 14, 6])
        """
        pieces = list(self)
        low, high = 0, self.budget.max_tokens  # of these, the higher one needs no more than `count`
        while len(pieces) < count and high - low > 1:
            middle = (low + high) // 2
            smaller = self._packed(middle)
            if len(smaller) <= count:
                high, pieces = middle, smaller
            else:
                low = middle
        while len(pieces) < count:
            splits = [p for p in pieces if p.size >= 2 * least and self.indivisible(p) is None]
            if not splits:
                break
            largest = max(splits, key=lambda piece: piece.tokens)
            place = pieces.index(largest)
            pieces[place : place + 1] = self._halves(largest)
        return pieces

    def _packed(self, max_tokens: int) -> list[Piece]:
        """The pieces by another budget."""
        packs = packed(self._extents, max_tokens, self.budget.max_rows, self._units)
        return [Piece(rows, (start, stop)) for rows, start, stop in packs]

    def _halves(self, piece: Piece) -> list[Piece]:
        return _split(piece, -(-piece.size // 2), self.groups)

    def refused(self) -> bool:
        """One row alone can't be evaluated, which is no news for other rows."""
        return False

    def fitting(self, piece: Piece) -> list[Piece]:
        """The piece, or smaller ones where the budget has been lowered since it was packed."""
        if piece.tokens <= self.budget.max_tokens:
            return [piece]
        return _split(piece, max(self.budget.max_tokens * piece.size // piece.tokens, 1), self.groups)
