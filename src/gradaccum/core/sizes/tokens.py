"""Rows packed into micro-batches by their tokens, for `max_tokens`."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterator, Sequence

from gradaccum.core.sizes.plans import Groups, Plan, Slice, spans_of
from gradaccum.schedule import checked_count


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
            cut = [order[i:j] for i, j in spans_of(sizes)] if groups is None else groups.cut(order, max(sizes))
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
            self.pieces = [self._joined([list(range(*span))]) for span in spans_of(sizes)]

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
