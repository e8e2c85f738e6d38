"""The large batch of all ranks: each brings its own rows, and the update and the loss are those of all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.gradients import GradientSum
from gradaccum.torch.distributed import SingleRank, Total, check_detected
from gradaccum.torch.loss import LossAccumulator, Objective, Weight

__all__ = ["GlobalBatch", "check_members", "check_sizes"]

logger = logging.getLogger("gradaccum")


class GlobalBatch:
    """Puts a rank's window together with those of the others.

    Args:
        ranks: What keeps the ranks together.
        sums: The gradients of this rank's micro-batches.
    """

    def __init__(self, ranks: SingleRank, sums: GradientSum) -> None:
        self.ranks = ranks
        self._sums = sums
        self._unit = 1.0

    def open(self, objective: Objective, batch: Batch) -> LossAccumulator:
        """A window over this rank's rows, whose parts are shares of all ranks' loss, where their weight is known.

        They must be so in the backward pass already: it spans the ranks where SyncBatchNorm does.
        """
        mine = objective.total(batch) if self.ranks.several else None
        # What a sharded model adds up over the ranks on the way has one unit from the start.
        unit = 1.0 if self.ranks.in_step else None
        return LossAccumulator(objective, batch, None if mine is None else self.ranks.sum_number(float(mine)), unit)

    def close(self, window: LossAccumulator) -> tuple[Tensor, Weight | None, bool]:
        """The loss over all ranks' rows; what the summed gradients are to be divided by; whether anything weighs.

        Raises:
            WindowError: Another rank has dropped out.
        """
        if not self.ranks.several:
            return window.loss, window.divisor, not window.empty
        known = window.unit_and_weight()
        factor, weight = (1.0, 0.0) if known is None else known
        if known is not None and not self.ranks.in_step:
            self._sums.scale_(factor / self._unit)
        total = self.ranks.total(Total(weight, given=known is not None, largest=weight))
        loss = self.ranks.sum(window.sum.double() * factor)
        unit, self._unit = self._unit, 1.0 if self.ranks.in_step else total.largest or self._unit
        if total.given:
            weighs, divisor = total.weight > 0, total.weight / unit / self.ranks.size
            loss = loss / total.weight if weighs else loss
        else:
            weighs, divisor = not window.empty, 1 / self.ranks.size
        if not weighs:
            loss = torch.full_like(loss, float("nan"))
        return loss.to(window.sum.dtype), divisor, weighs


def check_members(model: nn.Module, parameters: Sequence[Tensor], ranks: SingleRank) -> None:
    """Whether all ranks are known that share this model's update, and all parameters that they reduce.

    Raises:
        ValueError: Ranks were found that a wrapper hides.
    """
    check_detected(model, parameters, ranks, steps=1)
    own = set(map(id, parameters))
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    if outside and ranks.several:
        logger.warning(
            "%d parameters that require a gradient are in none of TrainStep's optimizers: their gradients are not "
            "reduced over the ranks.",
            len(outside),
        )


def check_sizes(ranks: SingleRank, micro_batch_size: Any, max_tokens: int | None) -> None:
    """Whether micro-batches of these sizes can run on all ranks at the same time, where they must.

    Raises:
        ValueError: They have to be tried out, and the model is sharded.
    """
    if ranks.in_step and (micro_batch_size == "auto" or max_tokens is not None):
        raise ValueError(
            "With a sharded model sizes and padding cannot be tried out: other ranks would wait in these passes. "
            f"Received: micro_batch_size={micro_batch_size!r}, max_tokens={max_tokens!r}. Give a number of rows."
        )
