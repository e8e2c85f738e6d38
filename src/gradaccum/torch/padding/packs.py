"""The padded rows of one call, sorted by length and packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradaccum.core.sizes import TokenBudget, Tokens
from gradaccum.torch.padding.columns import Left, cut, extents, kept_columns, mask_of, text_of

__all__ = ["Packs"]


class Packs:
    """How padded rows are packed into micro-batches of at most so many tokens.

    Example:
        >>> lengths = torch.tensor([1, 3, 2, 3])
        >>> packs = Packs({"attention_mask": torch.arange(4) < lengths[:, None]}, TokenBudget(6), "cut")
        >>> packs.order, packs.sizes, packs.columns
        (tensor([1, 3, 2, 0]), [2, 2], [(0, 3), (0, 2)])
    """

    def __init__(self, tree: Any, budget: TokenBudget, left: Left, sizes: Sequence[int] | None = None) -> None:
        self.extents = found = extents(tree)
        """Of each row the columns between which its tokens are."""
        self.left, self.width = left, mask_of(tree).shape[1]
        self.padded = frozenset(
            side
            for side, is_padded in (
                ("left", any(start > 0 for start, _ in found)),
                ("right", any(stop < self.width for _, stop in found)),
            )
            if is_padded
        )
        """The sides on which there is padding."""
        self.text = text_of(tree, len(found), self.width)
        """The paths of what is cut."""
        found = [kept_columns(extent, left, self.width) for extent in found]
        pieces = Tokens(budget, found, sizes).pieces
        self.sizes = [piece.size for piece in pieces]
        """Rows of each micro-batch."""
        self.columns = [piece.columns or (0, self.width) for piece in pieces]
        """Columns of each micro-batch."""
        self.order = torch.tensor([row for piece in pieces for row in piece.rows])  # type: ignore[union-attr]  # lists
        """The rows, as they come: the longest ones first."""
        self.back = torch.empty_like(self.order)
        """Where each row has come."""
        self.back[self.order] = torch.arange(len(self.order))

    def telling(self, tree: Any, most: int) -> torch.Tensor:
        """A few rows of all lengths: those with the most padding on the left and on the right, and an empty one."""
        filled = (torch.as_tensor(mask_of(tree)) != 0).any(1).tolist()
        order = self.order.tolist()
        rows = [row for row in order if filled[row]] or order
        ends = [min(rows, key=lambda row: self.extents[row][1]), *[row for row in order if not filled[row]][:1]]
        spread = [rows[int(place)] for place in torch.linspace(0, len(rows) - 1, most).round()]
        first = list(dict.fromkeys([max(rows, key=lambda row: self.extents[row][0]), *spread]))
        first = [row for row in first if row not in ends]
        return torch.tensor([*first[: most - len(ends)], *dict.fromkeys(ends)])

    def trimmed(self, tree: Any, index: int) -> Any:
        """The rows of a micro-batch, with its columns alone."""
        start, stop = self.columns[index]
        numbered = self.left == "number" and start > 0
        return cut(tree, self.sizes[index], self.width, start, stop, positions=numbered)
