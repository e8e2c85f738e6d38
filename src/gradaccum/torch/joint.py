"""The large batch of all ranks: each brings its own rows, and the update and the loss are those of all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradaccum.torch.distributed import Alone, Total
from gradaccum.torch.gradients import GradientSum
from gradaccum.torch.loss import Tally, Weight

__all__ = ["JointBatch"]


class JointBatch:
    """Puts a rank's window together with those of the others, after its last micro-batch.

    Args:
        ranks: What keeps the ranks together.
        sums: The gradients of this rank's micro-batches.
    """

    def __init__(self, ranks: Alone, sums: GradientSum) -> None:
        self.ranks = ranks
        self._sums = sums
        self._unit = 1.0

    def close(self, tally: Tally) -> tuple[Tensor, Weight | None, bool]:
        """The loss over all ranks' rows; what the summed gradients are to be divided by; whether anything weighs.

        Raises:
            WindowError: Another rank has dropped out.
        """
        if not self.ranks.several:
            return tally.loss, tally.divisor, not tally.empty
        factor, weight = tally.share()
        if weight is not None:
            self._sums.scale_(factor / self._unit)
        mine = weight or 0.0
        total = self.ranks.total(Total(mine, given=weight is not None, largest=mine))
        # A loss over no rows is NaN, and counts nothing.
        loss = torch.zeros_like(tally.sum, dtype=torch.float64) if weight == 0 else tally.sum.double() * factor
        loss = self.ranks.sum(loss)
        unit, self._unit = self._unit, total.largest or self._unit
        if not total.given:
            return loss.to(tally.sum.dtype), 1 / self.ranks.size, True
        loss = loss / total.weight if total.weight else torch.full_like(loss, float("nan"))
        return loss.to(tally.sum.dtype), total.weight / unit / self.ranks.size, total.weight > 0
