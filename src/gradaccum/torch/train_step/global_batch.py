"""The large batch of all ranks: each brings its own rows, and the update and the loss are those of all of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.private import after_backward
from gradaccum.on_torch.state import WindowState
from gradaccum.torch.distributed import (
    Listener,
    Ranks,
    Total,
    check_closures,
    check_detected,
    detect_ranks,
    take_over,
)
from gradaccum.torch.loss import BatchLosses, Objective, Terms, Totals, Weight, counted
from gradaccum.torch.train_step.options import Options, inside
from gradaccum.torch.train_step.update import Update
from gradaccum.torch.train_step.window import WindowRunner

logger = logging.getLogger("gradaccum")

_NOT_COUNTED = (
    "The denominators of several losses must be known before the first backward pass, and counting them here takes a "
    "pass on all ranks at once. Return {name: loss} from `compute_loss`, and give weight=lambda *batch: {name: number}."
)

_ROWS = ("rows of all ranks",)
"""A name that no loss has."""


class GlobalBatch(Listener):
    """Puts a rank's window together with those of the others."""

    def __init__(self, ranks: Ranks, sums: GradientBuffer) -> None:
        self.ranks = ranks
        self._sums = sums
        self._window: BatchLosses | None = None
        ranks.attach(self)
        self._met = False  # whether the ranks have told each other what kind of loss they have

    def open(self, objective: Objective, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        """A window over this rank's rows, whose parts are shares of all ranks' loss, where their weight is known.

        They must be so in the backward pass already: it spans the ranks where SyncBatchNorm does.
        """
        mine, found = objective.total(batch), objective.found
        if isinstance(mine, dict):
            return self._of_terms(objective, batch, mine, None)
        if objective.weight is None and (found.terms or not self._met):  # some rank may have several
            forwarded = count()
            if found.terms and forwarded is None:
                raise ValueError(_NOT_COUNTED)
            totals = None if forwarded is None else counted(objective, forwarded if found.terms else [])
            window = self._of_terms(objective, batch, totals or {}, totals)
            found.terms = found.terms or bool(window.totals)
            if found.terms:
                return window
        self._window = self._of_one_loss(objective, batch, None if mine is None else float(mine))
        return self._window

    def _of_one_loss(self, objective: Objective, batch: Batch, mine: float | None) -> BatchLosses:
        ranks = self.ranks
        if mine is not None and ranks.unit is not None and not ranks.sharded:
            return BatchLosses(objective, batch, ranks.unit, weight=mine)
        # What a sharded model adds up over the ranks on the way has one unit from the start.
        total = None if mine is None else sum(ranks.messages.numbers(mine))
        if total and not ranks.sharded:
            # Where passes span the ranks, as with SyncBatchNorm, all of them need one unit from the start.
            ranks.unit = total / ranks.size
        return BatchLosses(objective, batch, total, unit=ranks.unit if ranks.sharded else None, multiples=ranks.sharded)

    def own_unit(self) -> float:
        return 1.0 if self._window is None else self._window.own_unit()

    def take_unit(self, unit: float) -> float:
        after_backward(functools.partial(self.ranks.engine.scale, 1.0))  # later micro-batches have it in their factors
        return 1.0 if self._window is None else self._window.take_unit(unit)

    def reopen(
        self, window: BatchLosses, objective: Objective, batch: Batch, count: Callable[[], list[Terms] | None]
    ) -> BatchLosses:
        """The window that begins once more, with the arguments of `open`. Exchanges nothing with other ranks."""
        if objective.found.terms and not window.named:
            raise ValueError(_NOT_COUNTED)
        window.restart()
        return window

    def _of_terms(self, objective: Objective, batch: Batch, mine: Totals, own: Totals | None) -> BatchLosses:
        self._met, self._window = True, None
        own_totals = {_ROWS: batch.rows, **{name: float(total) for name, total in mine.items()}}
        totals = self.ranks.messages.sum_by_name(own_totals)
        rows = totals.pop(_ROWS)
        return BatchLosses(objective, batch, dict(totals), named=True, counted=own, rows=rows)

    def close(
        self, window: BatchLosses, state: WindowState
    ) -> tuple[Tensor, bool, dict[Hashable, Tensor], Weight | None]:
        """Over all ranks' rows: the loss; whether anything weighs; several losses; what gradients are divided by."""
        known = window.unit_and_weight()
        unit, weight = known or (1.0, 0.0)
        # A few numbers go with the ranks' message; on a device they are added up there, and nobody waits for them.
        losses = window.sum
        ride = [unit * loss for loss in losses.reshape(-1).tolist()] if losses.is_cpu else []
        mine = Total(weight, given=known is not None, largest=weight, idle=not window.ran)

        def rescale(of_all: float, *_: float) -> None:
            if unit != of_all:
                self._sums.scale_(unit / of_all)

        closed = self.ranks.total(mine, rescale if known is not None and not self.ranks.sharded else None, ride)
        if closed.buffers_from is not None:
            take_over(state.buffers(), state.device, self.ranks.channel, closed.buffers_from, takes=not window.ran)
        if ride:
            sums = torch.tensor(closed.sums, dtype=torch.float64).view_as(losses)
        else:
            sums = self.ranks.engine.sum(losses.double() * unit)
        weight_of_all = closed.total.weight if closed.total.given else None
        sums, divisor, weighs = self._finished(window, sums, closed.unit, weight_of_all)
        sums = sums.to(losses.dtype)
        loss = sums.sum()
        return loss if weighs else torch.full_like(loss, float("nan")), weighs, window.each(sums), divisor

    def _finished(
        self, window: BatchLosses, sums: Tensor, unit: float, weight: float | None
    ) -> tuple[Tensor, Weight, bool]:
        """The losses over all ranks' rows; what the gradients are to be divided by; whether anything weighs."""
        weighs, divisor = not window.empty, 1 / self.ranks.size
        if weight is not None:
            weighs, divisor = weight > 0, weight / unit / self.ranks.size
            sums = sums / weight if weighs else sums
        return sums, divisor, weighs


class RanksRunner(WindowRunner):
    """Windows whose gradients and losses are those of all ranks' rows."""

    def __init__(self, *arguments: Any, ranks: Ranks, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.ranks = ranks
        self._global_batch = GlobalBatch(ranks, self.buffer)

    def clear(self) -> None:
        super().clear()
        self.ranks.engine.clear()
        self.ranks.expect(closes=False, steps=1)

    def open(self, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        return self._global_batch.open(self.objective, batch, count)

    def reopen(self, window: BatchLosses, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        return self._global_batch.reopen(window, self.objective, batch, count)

    def close(self, window: BatchLosses) -> tuple[Tensor, bool, dict[Hashable, Tensor], Weight | None]:
        return self._global_batch.close(window, self.state)

    def count(self, batch: Batch, sizes: Sequence[int] | None, first: bool) -> list[Terms] | None:
        # Where passes span the ranks, counting would have to run on all of them at once.
        return None if self.state.always else super().count(batch, sizes, False)

    def alone(self) -> Objective:
        return self.objective.on(inside(self.objective.model))

    def rows_of_all(self, batch: Batch) -> int:
        return round(sum(self.ranks.messages.numbers(batch.rows)))


def check_members(model: nn.Module, parameters: Sequence[Tensor], ranks: Ranks) -> None:
    """Whether all ranks are known that share this model's update, and all parameters that they reduce."""
    check_detected(model, parameters, ranks, steps=1)
    own = set(map(id, parameters))
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    if outside and ranks.is_distributed:
        logger.warning(
            "%d parameters that require a gradient are in none of TrainStep's optimizers: their gradients are not "
            "reduced over the ranks.",
            len(outside),
        )


def detected(model: nn.Module, objective: Objective, update: Update, options: Options) -> Ranks:
    """What keeps this model's large batches together with those of the other ranks, which have the same options."""
    ranks = detect_ranks(
        model,
        update.optimizers,
        whole_batches=True,
        options={
            "reduction": objective.reduction,
            "weight": objective.weight and "given",
            **options.gradients,
            "noise_scale": update.noise is not None,
            "scaler": update.scaler and "given",
            "sync": options.sync,
            "reproducible": options.reproducible,
            "batch_norm": options.batch_norm.replace("warn", "micro"),
        },
    )
    check_closures(options.closures(), ranks)
    return ranks
