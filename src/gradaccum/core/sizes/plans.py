"""Rows and tokens into micro-batches: plans of the slices of a large batch, which get strictly smaller where one fails.

One protocol for all of them: iterate over a plan for its slices; `indivisible` says which of them can't be smaller;
`too_large` takes the tokens (or rows) of a slice that ran out of memory, and returns the plan of smaller ones.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradaccum.core.sizes.search import FixedSize, Sizer, even_sizes
from gradaccum.schedule import checked_count


class Groups:
    """Which rows of a batch stay together, as pairs do; the rows of a group lie one behind the other."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        sizes = [(group, len(list(rows))) for group, rows in itertools.groupby(ids)]
        self._ends = list(itertools.accumulate(size for _, size in sizes))
        self.runs = [(group, end - size, size) for (group, size), end in zip(sizes, self._ends, strict=True)]
        """Of each group its id, its first row, and its number of rows."""

    def stop(self, start: int, wanted: int, most: int) -> int:
        """Where a micro-batch ends that begins at a group: after `wanted` rows or a few more, `most` at most, one group
        at least."""
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._ends, start + wanted, first)
        if last >= len(self._ends) or (last > first and self._ends[last] - start > most):
            last -= 1
        return self._ends[last]

    def cut(self, rows: Sequence[int], size: int) -> list[list[int]]:
        """Lists of whole groups, of at most `size` rows together, one group at least; as even as comes easily."""
        parts: list[list[int]] = [[]]
        left = len(rows)
        for unit in [list(unit) for _, unit in itertools.groupby(rows, key=self.ids.__getitem__)]:
            count, last = -(-left // max(size, 1)), len(parts[-1])
            if last and (last + len(unit) > size or last * count >= left):  # as many as the others will have
                left -= last
                parts.append([])
            parts[-1] += unit
        return parts

    def alone(self, rows: Sequence[int]) -> int | None:
        """The group that these rows are, if they are one."""
        first, last = self.ids[rows[0]], self.ids[rows[-1]]
        return first if first == last else None

    def described(self, group: int) -> str:
        """A group in a message: not which rows, which may have been brought together."""
        return f"group {group} ({self.ids.count(group)} rows)"


class Slice(NamedTuple):
    """One micro-batch: which rows, and up to which columns where rows are padded."""

    rows: slice | list[int]
    columns: tuple[int, int] | None = None
    packs: list[list[int]] | None = None
    """Where rows lie one behind the other: the rows of each packed row."""

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def tokens(self) -> int:
        rows = self.size if self.packs is None else len(self.packs)
        return rows * (self.columns[1] - self.columns[0] if self.columns is not None else 1)

    def split(self, size: int, groups: Groups | None = None, most: int | None = None) -> list[Slice]:
        """Slices of at most `size` rows, as even as can be; of whole groups, where rows belong together; `most` so many
        slices, of which the last is what is left."""
        together = isinstance(self.rows, slice)
        rows = range(self.rows.start, self.rows.stop) if isinstance(self.rows, slice) else self.rows
        sizes = even_sizes(len(rows), size) if groups is None else [len(part) for part in groups.cut(rows, size)]
        sizes = sizes if most is None else [*sizes[: most - 1], sum(sizes[most - 1 :])]
        parts = [rows[start:stop] for start, stop in _spans(sizes)]
        return [Slice(slice(p[0], p[-1] + 1) if together else list(p), self.columns) for p in parts]


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))


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

    def too_large(self, cost: int) -> Plan | None:
        """A slice of so many tokens, or rows, ran out of memory: the plan of strictly smaller ones; None: none is."""
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
        return self._in_halves(list(self), count, least)

    def _in_halves(self, pieces: list[Slice], count: int, least: int) -> list[Slice]:
        """So many, by halving the costliest."""
        while len(pieces) < count:
            splits = [p for p in pieces if p.size >= 2 * least and self.indivisible(p) is None]
            if not splits:
                break
            place = pieces.index(max(splits, key=lambda piece: piece.tokens))
            pieces[place : place + 1] = self._halves(pieces[place])
        return pieces

    def _halves(self, piece: Slice) -> list[Slice]:
        return piece.split(-(-piece.size // 2), self.groups, most=2)


class Rows(Plan):
    """A batch cut by rows."""

    def __init__(self, sizer: Sizer, rows: int, groups: Groups | None = None) -> None:
        self.sizer, self.rows, self.groups = sizer, rows, groups
        self._wanted: dict[int, int] = {}
        if groups is not None and rows and isinstance(sizer, FixedSize) and sizer.ceiling is None:
            group, _, size = max(groups.runs, key=lambda run: run[2])
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
        return self._asked()

    def _asked(self) -> Iterator[Slice]:
        start, sizer = 0, self.sizer
        while start < self.rows:
            wanted = sizer.next_size(self.rows - start)
            stop = start + wanted
            if self.groups is not None:
                wanted = min(wanted, sizer.ceiling or wanted)  # what is left over may be less than a size's minimum
                stop = self.groups.stop(start, wanted, max(wanted, sizer.size) if sizer.settled else wanted)
            self._wanted[start] = wanted
            yield Slice(slice(start, stop))
            start = stop

    def record(self, piece: Slice, seconds: float, base: float, peak: float) -> None:
        assert isinstance(piece.rows, slice)
        wanted = self._wanted.get(piece.rows.start, piece.size)  # whole groups are a few rows more, or less
        part = wanted / piece.size
        self.sizer.record(wanted, seconds * part, base, base + (peak - base) * part)

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


@functools.lru_cache(maxsize=64)
def _even(rows: int, size: int) -> list[Slice]:
    return Slice(slice(0, rows)).split(size)


class GivenSizes(Rows):
    """A batch cut into slices of given sizes."""

    def __init__(self, sizes: Sequence[int], groups: Groups | None = None) -> None:
        super().__init__(FixedSize(max(sizes)), sum(sizes), groups)
        self.sizes = sizes

    def __iter__(self) -> Iterator[Slice]:
        return iter([Slice(slice(*span)) for span in _spans(self.sizes)])

    def too_large(self, cost: int) -> Plan | None:
        """None: whoever gave these sizes decides."""
        return None


class TokenBudget:
    """The padded tokens that a micro-batch may have: what somebody chose, lowered where it turns out not to fit."""

    def __init__(self, max_tokens: int, max_rows: int | None = None) -> None:
        self.max_tokens, self.max_rows = checked_count(max_tokens, "max_tokens"), max_rows
        self.lowered = False
        """Whether it is less than was chosen."""


class Tokens(Plan):
    """A batch of padded rows, packed by a budget of tokens; or cut into given sizes, the longest rows first."""

    def __init__(
        self,
        budget: TokenBudget,
        extents: list[tuple[int, int]],
        sizes: Sequence[int] | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.budget, self.groups, self._extents, self._sizes = budget, groups, extents, sizes
        self.pieces = self._packed(budget.max_tokens)
        if sizes is not None:
            order = [row for piece in self.pieces for row in piece.rows]  # type: ignore[union-attr]  # lists
            cut = [order[i:j] for i, j in _spans(sizes)] if groups is None else groups.cut(order, max(sizes))
            spans = [[extents[row] for row in rows] for rows in cut]
            columns = [(min(i for i, _ in part), max(j for _, j in part)) for part in spans]
            self.pieces = [Slice(*piece) for piece in zip(cut, columns, strict=True)]
        elif groups is not None and not budget.lowered:
            self._check(groups)

    def _packed(self, max_tokens: int) -> list[Slice]:
        units = None if self.groups is None else [list(range(i, i + size)) for _, i, size in self.groups.runs]
        packs = packed(self._extents, max_tokens, self.budget.max_rows, units)
        return [Slice(rows, (start, stop)) for rows, start, stop in packs]

    def _check(self, groups: Groups) -> None:
        most, budget = self.budget.max_rows, self.budget.max_tokens
        for piece in self.pieces:
            if piece.size > 1 and (piece.tokens > budget or (most is not None and piece.size > most)):
                assert isinstance(piece.rows, list)
                raise ValueError(
                    f"A group does not fit into a micro-batch: {groups.described(groups.ids[piece.rows[0]])} of up to "
                    f"{piece.tokens // piece.size} columns, {piece.tokens} padded tokens, in max_tokens={budget}"
                    + (f", micro_batch_size={most}" if most is not None else "")
                    + ". Its rows stay together, so allow more."
                )

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.budget.max_tokens

    @property
    def lowered(self) -> bool:  # type: ignore[override]
        return self.budget.lowered

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.pieces)

    def too_large(self, cost: int) -> Plan | None:
        if self._sizes is not None:
            return None
        # What can be split costs no more than the budget, so that this is less.
        self.budget.lowered = True
        self.budget.max_tokens = max(min(self.budget.max_tokens, cost // 2), 1)
        smaller = copy.copy(self)
        smaller.pieces = self._packed(self.budget.max_tokens)
        return smaller

    def in_passes(self, count: int, least: int = 1) -> list[Slice]:
        """See `Plan`; packed by the smallest budget that needs no more, so that a rank's passes cost about the same.

        Example:
            >>> tokens = Tokens(TokenBudget(40), [(0, 9), (0, 8), (0, 7), (0, 3), (0, 3), (0, 2)])
            >>> [piece.tokens for piece in tokens], [piece.tokens for piece in tokens.in_passes(3)]
            ([36, 6], [18, 14, 6])
        """
        pieces = self.pieces
        low, high = 0, self.budget.max_tokens  # of these, the higher one needs no more than `count`
        while len(pieces) < count and high - low > 1:
            middle = (low + high) // 2
            smaller = self._packed(middle)
            if len(smaller) <= count:
                high, pieces = middle, smaller
            else:
                low = middle
        return self._in_halves(list(pieces), count, least)


class Joined(Tokens):
    """A batch of padded rows, laid one behind the other, as many as the longest one has tokens.

    Example:
        >>> plan = Joined(TokenBudget(10), [3, 5, 4, 2, 1])
        >>> [(piece.packs, piece.tokens) for piece in plan]
        [([[1], [2, 4]], 10), ([[0, 3]], 5)]
    """

    def __init__(self, budget: TokenBudget, lengths: Sequence[int], sizes: Sequence[int] | None = None) -> None:
        self.budget, self.lengths, self._sizes = budget, lengths, sizes
        if sizes is None:
            self.pieces = self._packed(budget.max_tokens)
        else:
            sizes = [len(lengths)] if max(sizes) == 1 else sizes
            self.pieces = [self._joined([list(range(*span))]) for span in _spans(sizes)]

    def _packed(self, max_tokens: int) -> list[Slice]:
        pieces, packs = list[Slice](), list[list[int]]()
        for pack in _best_fit(self.lengths, min(max(self.lengths, default=1), max_tokens)):
            together = self._joined([*packs, pack])
            if packs and (together.tokens > max_tokens or together.size > (self.budget.max_rows or together.size)):
                pieces.append(self._joined(packs))
                packs = []
            packs.append(pack)
        return [*pieces, self._joined(packs)] if packs else pieces

    def _joined(self, packs: list[list[int]]) -> Slice:
        columns = max(sum(self.lengths[row] for row in pack) for pack in packs)
        return Slice(list(itertools.chain(*packs)), (0, columns), packs)

    def _halves(self, piece: Slice) -> list[Slice]:
        assert piece.packs is not None
        one = len(piece.packs) == 1
        packs = [[row] for row in piece.packs[0]] if one else piece.packs
        halves = packs[: -(-len(packs) // 2)], packs[-(-len(packs) // 2) :]
        return [self._joined([[row for pack in half for row in pack]] if one else half) for half in halves]


def packed(
    extents: Sequence[tuple[int, int]],
    max_tokens: int,
    max_rows: int | None = None,
    units: Sequence[list[int]] | None = None,
) -> list[tuple[list[int], int, int]]:
    """Rows of different lengths, sorted and packed into micro-batches of at most `max_tokens` padded tokens."""
    ends = [
        (min(extents[row][0] for row in unit), max(max(extents[row][1], extents[row][0] + 1) for row in unit), unit)
        for unit in (units if units is not None else [[row] for row in range(len(extents))])
    ]
    packs: list[tuple[list[int], int, int]] = []
    for first, last, unit in sorted(ends, key=lambda end: (end[0] - end[1], end[2][0])):
        rows, start, stop = packs[-1] if packs else ([], first, last)
        start, stop, count = min(start, first), max(stop, last), len(rows) + len(unit)
        if rows and count * (stop - start) <= max_tokens and (max_rows is None or count <= max_rows):
            packs[-1] = rows + unit, start, stop
        else:
            packs.append((unit, first, last))
    return packs


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in as few packed rows as comes easily: the longest first, each into the fullest one that has room for it."""
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """Of each packed row the tokens that fit into it still, and its place; sorted."""
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place < len(room):
            left, pack = room.pop(place)
            packs[pack].append(row)
        else:
            left, pack = capacity, len(packs)
            packs.append([row])
        if left > lengths[row]:
            bisect.insort(room, (left - lengths[row], pack))
    return sorted(packs, key=lambda pack: -sum(lengths[row] for row in pack))
