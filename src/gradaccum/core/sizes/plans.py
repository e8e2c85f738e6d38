"""Rows and tokens into micro-batches: plans of the slices of a large batch, which get strictly smaller where one fails.

One protocol for all of them: iterate over a plan for its slices; `indivisible` says which of them can't be smaller;
`too_large` takes the tokens (or rows) of a slice that ran out of memory, and returns the plan of smaller ones.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradaccum.core.sizes.fixed import FixedSize, Sizer, even_sizes


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
        parts = [rows[start:stop] for start, stop in spans_of(sizes)]
        return [Slice(slice(p[0], p[-1] + 1) if together else list(p), self.columns) for p in parts]


def spans_of(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
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
        return iter([Slice(slice(*span)) for span in spans_of(self.sizes)])

    def too_large(self, cost: int) -> Plan | None:
        """None: whoever gave these sizes decides."""
        return None
