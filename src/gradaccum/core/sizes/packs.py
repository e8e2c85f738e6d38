"""Rows of different lengths laid one behind the other, so that hardly any padding is left."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from gradaccum.core.sizes.pieces import Piece, TokenBudget, Tokens

__all__ = ["Joined", "best_fit"]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in as few packed rows as comes easily: the longest first, each into the fullest one that has room for it.

    Args:
        lengths: Tokens of each row.
        capacity: Tokens of a packed row. A row longer than that goes alone.

    Returns:
        The rows of each packed row, in order; the fullest ones first.

    Example:
        >>> best_fit([3, 9, 4, 2, 5], 9)
        [[1], [4, 2], [0, 3]]
    """
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
    return sorted(packs, key=lambda pack: -_tokens(pack, lengths))


def _tokens(pack: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in pack)


class Joined(Tokens):
    """A batch of padded rows, laid one behind the other, as many as the longest one has tokens.

    Args:
        budget: Tokens of a micro-batch: its packed rows times the columns of the fullest.
        lengths: Tokens of each row.
        sizes: Rows of the micro-batches, in order, each of one packed row; None: as many as the budget allows. Where
            each is of a single row, they are joined: there would be nothing to see of what packing does.

    Example:
        >>> plan = Joined(TokenBudget(10), [3, 5, 4, 2, 1])
        >>> [(piece.packs, piece.tokens) for piece in plan]
        [([[1], [2, 4]], 10), ([[0, 3]], 5)]
    """

    def __init__(self, budget: TokenBudget, lengths: Sequence[int], sizes: Sequence[int] | None = None) -> None:
        self.budget, self.groups, self.lengths = budget, None, lengths
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

    def _piece(self, packs: list[list[int]]) -> Piece:
        columns = max(_tokens(pack, self.lengths) for pack in packs)
        return Piece(list(itertools.chain(*packs)), (0, columns), packs)

    def _packed(self, max_tokens: int) -> list[Piece]:
        return Joined(TokenBudget(max_tokens, self.budget.max_rows), self.lengths).pieces

    def fitting(self, piece: Piece) -> list[Piece]:
        """The piece, or smaller ones where the budget has been lowered since it was packed."""
        most = self.budget.max_rows or piece.size
        if piece.size == 1 or (piece.tokens <= self.budget.max_tokens and piece.size <= most):
            return [piece]
        return [smaller for half in self._halves(piece) for smaller in self.fitting(half)]

    def _halves(self, piece: Piece) -> list[Piece]:
        assert piece.packs is not None
        packs = piece.packs if len(piece.packs) > 1 else [[row] for row in piece.packs[0]]
        half = -(-len(packs) // 2)
        parts = [packs[:half], packs[half:]]
        if len(piece.packs) == 1:
            parts = [[list(itertools.chain(*part))] for part in parts]
        return [self._piece(part) for part in parts]
