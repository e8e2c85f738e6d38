"""Rows and tokens into micro-batches: plans of the slices of a large batch, which get strictly smaller where one fails.

One protocol for all of them: iterate over a plan for its slices; `indivisible` says which of them can't be smaller;
`too_large` is told what a slice that ran out of memory cost, and returns the plan of smaller ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradaccum.core.sizes.even import FixedSize, best_fit, even_sizes, packed
from gradaccum.core.sizes.groups import Groups
from gradaccum.core.sizes.search import SizeSearch
from gradaccum.schedule import checked_count

__all__ = ["GivenSizes", "Joined", "Plan", "Rows", "Sizer", "Slice", "TokenBudget", "Tokens"]

Sizer = SizeSearch | FixedSize


class Slice(NamedTuple):
    """One micro-batch: which rows, and up to which columns where rows are padded.

    Example:
        >>> [part.rows for part in Slice(slice(4, 14)).split(4)]
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

    def split(self, size: int, groups: Groups | None = None) -> list[Slice]:
        """Slices of at most `size` rows, as even as can be; of whole groups, where rows belong together."""
        rows = range(self.rows.start, self.rows.stop) if isinstance(self.rows, slice) else self.rows
        if groups is None:
            ends = itertools.accumulate(even_sizes(len(rows), size), initial=0)
            parts: list[Sequence[int]] = [rows[start:stop] for start, stop in itertools.pairwise(ends)]
        else:
            parts = [*groups.cut(rows, size)]
        together = isinstance(self.rows, slice)
        return [Slice(slice(p[0], p[-1] + 1) if together else list(p), self.columns) for p in parts]


class Plan:
    """The micro-batches of one large batch, in order."""

    groups: Groups | None = None
    """Which rows stay together."""
    measuring = False
    """Whether somebody wants to know what micro-batches cost."""
    size: int
    """What a slice costs at most: rows, or tokens."""
    lowered: bool
    """Whether slices are smaller than was asked for, since some ran out of memory."""

    def __iter__(self) -> Iterator[Slice]:
        raise NotImplementedError

    def cost(self, piece: Slice) -> int:
        """What `too_large` is told of a slice that doesn't fit: its rows, or its tokens."""
        raise NotImplementedError

    def too_large(self, cost: int) -> Plan | None:
        """A slice of this cost ran out of memory: the plan of strictly smaller ones; None: there is none."""
        raise NotImplementedError

    def record(self, piece: Slice, seconds: float, base: float, peak: float) -> None:
        """A micro-batch took so long, and so many bytes at its peak over `base` before it."""

    def needs_two_rows(self) -> bool:
        """One row alone can't be evaluated: two are the fewest from here on. Returns whether that is news."""
        return False

    def indivisible(self, piece: Slice) -> str | None:
        """What to call a slice that cannot be split; None where it can."""
        if self.groups is None or piece.size == 1:
            return "one row" if piece.size == 1 else None
        ends = [piece.rows.start, piece.rows.stop - 1] if isinstance(piece.rows, slice) else piece.rows
        group = self.groups.alone(ends)
        return None if group is None else f"{self.groups.described(group)}, whose rows stay together"

    def in_passes(self, count: int, least: int = 1) -> list[Slice]:
        """The slices of this batch, `count` of them where there are rows enough; none larger than planned."""
        raise NotImplementedError


class Rows(Plan):
    """A batch cut by rows."""

    def __init__(self, sizer: Sizer, rows: int, groups: Groups | None = None) -> None:
        self.sizer, self.rows, self.groups = sizer, rows, groups
        self._wanted: dict[int, int] = {}
        if groups is not None and rows and isinstance(sizer, FixedSize) and sizer.ceiling is None:
            group, _, size = groups.largest
            if size > sizer.size:
                raise ValueError(
                    f"A group does not fit into a micro-batch: {groups.described(group)} in micro_batch_size="
                    f"{sizer.size}. Its rows stay together, so give a `micro_batch_size` of {size} or more."
                )

    @property
    def measuring(self) -> bool:  # type: ignore[override]  # as of now
        return not self.sizer.settled

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.sizer.size

    @property
    def lowered(self) -> bool:  # type: ignore[override]
        return self.sizer.ceiling is not None and self.rows > 1

    def __iter__(self) -> Iterator[Slice]:
        if self.groups is None and self.rows and self.sizer.settled:
            return iter(_even(self.rows, self.sizer.size))
        return self._asked() if self.groups is None else self._in_groups(self.groups)

    def _asked(self) -> Iterator[Slice]:
        start = 0
        while start < self.rows:
            size = self.sizer.next_size(self.rows - start)
            yield Slice(slice(start, start + size))
            start += size

    def _in_groups(self, groups: Groups) -> Iterator[Slice]:
        start = 0
        while start < self.rows:
            wanted = self.sizer.next_size(self.rows - start)
            wanted = min(wanted, self.sizer.ceiling or wanted)  # what is left over may be less than a size's minimum
            stop = groups.stop(start, wanted, max(wanted, self.sizer.size) if self.sizer.settled else wanted)
            self._wanted[start] = wanted
            yield Slice(slice(start, stop))
            start = stop

    def record(self, piece: Slice, seconds: float, base: float, peak: float) -> None:
        assert isinstance(piece.rows, slice)
        wanted = self._wanted.get(piece.rows.start, piece.size)  # whole groups are a few rows more, or less
        part = wanted / piece.size
        self.sizer.record(wanted, seconds * part, base, base + (peak - base) * part)

    def cost(self, piece: Slice) -> int:
        return piece.size

    def too_large(self, cost: int) -> Plan | None:
        self.sizer.failed(cost)
        smaller = Rows(self.sizer, self.rows, self.groups)
        if self.groups is None and max((piece.size for piece in smaller), default=0) >= cost:
            return None  # a minimum stands against it
        return smaller

    def needs_two_rows(self) -> bool:
        known, self.sizer.minimum = self.sizer.minimum >= 2, 2
        self.sizer.size = max(self.sizer.size, 2)
        return not known

    def in_passes(self, count: int, least: int = 1) -> list[Slice]:
        """See `Plan`.

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
        for size in range(max(-(-self.rows // count), least), self.size):
            smaller = Slice(slice(0, self.rows)).split(size, self.groups)
            if len(smaller) <= count:
                return smaller
        return pieces


class GivenSizes(Rows):
    """A batch cut into slices of given sizes.

    Example:
        >>> [piece.rows for piece in GivenSizes([3, 1])]
        [slice(0, 3, None), slice(3, 4, None)]
    """

    def __init__(self, sizes: Sequence[int], groups: Groups | None = None) -> None:
        super().__init__(FixedSize(max(sizes)), sum(sizes), groups)
        self.sizes = sizes

    def __iter__(self) -> Iterator[Slice]:
        ends = itertools.accumulate(self.sizes, initial=0)
        return iter([Slice(slice(start, stop)) for start, stop in itertools.pairwise(ends)])

    def too_large(self, cost: int) -> Plan | None:
        """None: these sizes were given, and whoever gave them decides."""
        return None


@functools.lru_cache(maxsize=64)
def _even(rows: int, size: int) -> list[Slice]:
    return Slice(slice(0, rows)).split(size)


def _parts(rows: int, count: int) -> list[Slice]:
    """So many slices, as even as can be."""
    size, larger = divmod(rows, count)
    ends = itertools.accumulate([size + 1] * larger + [size] * (count - larger), initial=0)
    return [Slice(slice(start, stop)) for start, stop in itertools.pairwise(ends)]


class TokenBudget:
    """The padded tokens that a micro-batch may have: what somebody chose, lowered where it turns out not to fit."""

    def __init__(self, max_tokens: int, max_rows: int | None = None) -> None:
        self.max_tokens = checked_count(max_tokens, "max_tokens")
        self.max_rows = max_rows
        self.lowered = False
        """Whether it is less than was chosen."""


class Tokens(Plan):
    """A batch of padded rows, packed by a budget of tokens."""

    def __init__(
        self,
        budget: TokenBudget,
        extents: list[tuple[int, int]],
        sizes: Sequence[int] | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.budget, self.groups, self._extents, self._sizes = budget, groups, extents, sizes
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
        self.pieces = [Slice(rows, (start, stop)) for rows, start, stop in packs]

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

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.budget.max_tokens

    @property
    def lowered(self) -> bool:  # type: ignore[override]
        return self.budget.lowered

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.pieces)

    def cost(self, piece: Slice) -> int:
        return piece.tokens

    def too_large(self, cost: int) -> Plan | None:
        if self._sizes is not None:
            return None
        # What can be split costs no more than the budget, so that this is less.
        self.budget.lowered = True
        self.budget.max_tokens = max(min(self.budget.max_tokens, cost // 2), 1)
        return self._by(self.budget)

    def _by(self, budget: TokenBudget) -> Tokens:
        """The same rows by another budget."""
        return Tokens(budget, self._extents, None, self.groups)

    def in_passes(self, count: int, least: int = 1) -> list[Slice]:
        """See `Plan`. Packed by the smallest budget that needs no more, so that a rank's passes cost about the same.

        Example:
            >>> tokens = Tokens(TokenBudget(40), [(0, 9), (0, 8), (0, 7), (0, 3), (0, 3), (0, 2)])
            >>> [piece.tokens for piece in tokens], [piece.tokens for piece in tokens.in_passes(3)]
            ([36, 6], [18, 14, 6])
        """
        pieces = self.pieces
        low, high = 0, self.budget.max_tokens  # of these, the higher one needs no more than `count`
        while len(pieces) < count and high - low > 1:
            middle = (low + high) // 2
            other = TokenBudget(middle, self.budget.max_rows)
            other.lowered = True
            smaller = self._by(other).pieces
            if len(smaller) <= count:
                high, pieces = middle, smaller
            else:
                low = middle
        pieces = list(pieces)
        while len(pieces) < count:
            splits = [p for p in pieces if p.size >= 2 * least and self.indivisible(p) is None]
            if not splits:
                break
            largest = max(splits, key=lambda piece: piece.tokens)
            place = pieces.index(largest)
            pieces[place : place + 1] = self._halves(largest)
        return pieces

    def _halves(self, piece: Slice) -> list[Slice]:
        return piece.split(-(-piece.size // 2), self.groups)


class Joined(Tokens):
    """A batch of padded rows, laid one behind the other, as many as the longest one has tokens.

    Example:
        >>> plan = Joined(TokenBudget(10), [3, 5, 4, 2, 1])
        >>> [(piece.packs, piece.tokens) for piece in plan]
        [([[1], [2, 4]], 10), ([[0, 3]], 5)]
    """

    def __init__(self, budget: TokenBudget, lengths: Sequence[int], sizes: Sequence[int] | None = None) -> None:
        self.budget, self.lengths, self._sizes = budget, lengths, sizes
        if sizes is not None:
            rows = iter(range(len(lengths)))
            sizes = [len(lengths)] if max(sizes) == 1 else sizes
            self.pieces = [self._piece([list(itertools.islice(rows, size))]) for size in sizes]
            return
        self.pieces, packs = [], list[list[int]]()
        longest = min(max(lengths, default=1), budget.max_tokens)
        for pack in best_fit(lengths, longest):
            together = self._piece([*packs, pack])
            if packs and (together.tokens > budget.max_tokens or together.size > (budget.max_rows or together.size)):
                self.pieces.append(self._piece(packs))
                packs = []
            packs.append(pack)
        if packs:
            self.pieces.append(self._piece(packs))

    @property
    def computed(self) -> int:
        """Tokens that its micro-batches compute, those of the rest of padding among them."""
        return sum(piece.tokens for piece in self.pieces)

    def _piece(self, packs: list[list[int]]) -> Slice:
        columns = max(sum(self.lengths[row] for row in pack) for pack in packs)
        return Slice(list(itertools.chain(*packs)), (0, columns), packs)

    def _by(self, budget: TokenBudget) -> Tokens:
        return Joined(budget, self.lengths)

    def _halves(self, piece: Slice) -> list[Slice]:
        assert piece.packs is not None
        packs = piece.packs if len(piece.packs) > 1 else [[row] for row in piece.packs[0]]
        half = -(-len(packs) // 2)
        parts = [packs[:half], packs[half:]]
        if len(piece.packs) == 1:
            parts = [[list(itertools.chain(*part))] for part in parts]
        return [self._piece(part) for part in parts]
