"""A window of several losses, each divided by its own total over the large batch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.oom_retry import RestartWindow
from gradaccum.on_torch.private import run_backward
from gradaccum.torch.loss.accumulator import LossAccumulator, WeightedLoss
from gradaccum.torch.loss.divisors import Weight, is_zero, ratio, times, where_any
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.loss.terms import MIXED_TERMS, Terms, Totals, no_gradient_error, summed, weighed, wide

__all__ = ["TermsAccumulator", "accumulator", "counted"]

ROUNDING = 1e-6
"""Relative difference of two sums of the same weights, in other orders."""


class TermsAccumulator:
    """Adds up the losses and the gradients of a window's micro-batches, where the loss has several terms.

    The gradients of all terms add up in the same place, so the totals must be known before the first backward pass:
    from the batch, from a counting pass, or, where one micro-batch is the whole batch, from its own forward pass.
    """

    divisor = None
    """What the summed gradients are to be divided by: nothing."""
    is_mean = True
    retain_graph = False
    """As of a window of one loss."""
    ran = False
    """The same."""
    attempts = 0
    """How often the weights were other than counted."""

    def __init__(
        self, objective: Objective, batch: Batch, totals: Totals | None, mine: Totals | None = None, rows: float = 0.0
    ) -> None:
        self.objective = objective
        self.totals, self._counted = totals, mine
        self._batch_rows = batch.rows
        self._rows = rows or float(batch.rows)
        self._by_forward = totals is None
        self.restart()

    def restart(self) -> None:
        """Forget the micro-batches that were added."""
        self.ran = False
        if self._by_forward:
            self.totals = None
        self._parts: dict[Hashable, list[Tensor]] = {}
        self._weights: dict[Hashable, list[Weight]] = {}
        self._sum: Tensor | None = None
        self._has_gradient = False

    def multiple(self, weighted: WeightedLoss, rows: int) -> Weight:
        """Ratio of the first micro-batch's summed gradient to an estimate of the mean gradient."""
        return rows / self._rows

    def unit_and_weight(self) -> None:
        """For several ranks: their sums add up as they are."""

    @property
    def empty(self) -> bool:
        """Whether no term weighs anything, as far as that is known without waiting for a device."""
        return all(is_zero(total) for total in (self.totals or {}).values())

    @property
    def sum(self) -> Tensor:
        """What each term's weighted losses add up to so far, in the order of the totals, without a graph."""
        if self._sum is None:
            self._sum = self._added()
        return self._sum

    def _added(self) -> Tensor:
        device, found = self.objective.device, {}
        for name, parts in self._parts.items():
            found[name] = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        totals = self.totals or {}
        if not totals or len(found) < len(totals):
            parameter = next(self.objective.model.parameters(), torch.zeros(()))
            zero = wide(next(iter(found.values()), torch.zeros((), dtype=parameter.dtype, device=device)))
            zero = torch.zeros_like(zero, device=device)
            found = {name: found.get(name, zero) for name in totals or [None]}
        return torch.stack([found[name].to(device) for name in totals or [None]])

    def take(self, sums: Tensor) -> None:
        """Go on from the sums of all ranks."""
        self._sum = sums

    @property
    def loss(self) -> Tensor:
        """The large batch's loss so far, without a graph; NaN where nothing in it weighs anything."""
        return torch.full((), float("nan"), device=self.objective.device) if self.empty else self.sum.sum()

    @property
    def losses(self) -> dict[Hashable, Tensor]:
        """Each term's mean over the large batch; NaN where it weighs nothing, as 0 / 0 is."""
        found = {}
        for (name, total), mean in zip((self.totals or {}).items(), self.sum, strict=False):
            found[name] = (
                mean if isinstance(total, float) and total > 0 else mean.where(_above_0(total, mean), math.nan)
            )
        return found

    def forward(self, micro_batch: Batch, share: bool = False) -> WeightedLoss:
        """Run the forward pass of a micro-batch and weigh its terms. Changes nothing here: `add` does."""
        known = _by_batch(self.objective, micro_batch)
        if known is not None and all(is_zero(weight) for weight in known.values()):
            return WeightedLoss(None)
        loss, terms = self.objective.evaluate(micro_batch)
        found = weighed(_terms(terms, self.objective), known)
        if self.totals is None:
            if micro_batch.rows != self._batch_rows:
                raise RestartWindow
            self.totals = counted(self.objective, [_terms(terms, self.objective)])
        parts = {}
        for name, (value, weight) in found.items():
            if name not in self.totals:
                raise ValueError(
                    f"The loss term {name!r} is not among those that were counted: {list(self.totals)}. The same rows "
                    "must have the same terms each time they are evaluated; where one is missing, it weighs 0."
                )
            one = 1.0 if self.objective.reduction == "sum" else weight
            parts[name] = times(wide(where_any(value, weight)), ratio(one, self.totals[name]))
        weights = {name: weight for name, (_, weight) in found.items()}
        detached = {name: part.detach() for name, part in parts.items()}
        attached = [part for part in parts.values() if part.requires_grad]
        if not attached:
            return WeightedLoss(None, weightless=loss, terms=(detached, weights))
        return WeightedLoss(summed(attached), terms=(detached, weights))

    def backward(self, weighted: WeightedLoss, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch."""
        run_backward([loss], [torch.ones_like(loss, requires_grad=False)], retain_graph=self.retain_graph)

    def add(self, weighted: WeightedLoss) -> None:
        """Count a micro-batch whose gradient has arrived."""
        self.ran = self.ran or weighted.loss is not None or weighted.weightless is not None
        parts, weights = weighted.terms or ({}, {})
        self._sum = None
        self._has_gradient = self._has_gradient or weighted.loss is not None
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)
        for name, weight in weights.items():
            self._weights.setdefault(name, []).append(weight)

    def check(self) -> None:
        """All micro-batches are in: their weights must add up to what was counted before."""
        if self._parts and not self._has_gradient:
            raise no_gradient_error(self._parts)
        if self._counted is None:
            return
        found = _read(self._weights)
        for name, total in self._counted.items():
            now = found.get(name, 0.0)
            if math.isclose(now, float(total), rel_tol=ROUNDING):
                continue
            if not self.attempts and self.totals == self._counted:
                self.attempts = 1
                raise RestartWindow
            raise ValueError(
                f"The weights of the loss term {name!r} add up to {float(total):g} in the pass that counts them, and "
                f"to {now:g} in the micro-batches themselves: they are random, or depend on how rows are split. Where "
                "the batch tells them, give weight=lambda *batch: {name: number}; else draw random numbers before the "
                "batch is split, and give a fixed `micro_batch_size`."
            )


def accumulator(objective: Objective, batch: Batch) -> LossAccumulator | TermsAccumulator:
    """What adds up a window on one rank, without a counting pass."""
    totals = _by_batch(objective, batch)
    if totals is not None or objective.found.terms:
        return TermsAccumulator(objective, batch, totals)
    return LossAccumulator(objective, batch)


def counted(objective: Objective, forwarded: Sequence[Terms]) -> Totals:
    """The totals of the micro-batches of a counting pass."""
    weights: dict[Hashable, list[Weight]] = {}
    for terms in forwarded:
        for name, term in _terms(terms, objective).items():
            assert term.weight is not None
            weights.setdefault(name, []).append(term.weight)
    return dict(_read(weights))


def _read(weights: dict[Hashable, list[Weight]]) -> dict[Hashable, float]:
    """Each term's sum of weights: one wait for a device, where some are there."""
    waiting = [w for listed in weights.values() for w in listed if isinstance(w, Tensor)]
    read = iter(torch.stack([w.double().to(waiting[0].device) for w in waiting]).tolist() if waiting else [])
    totals = {}
    for name, listed in weights.items():
        numbers = [next(read) if isinstance(w, Tensor) else w for w in listed]
        for number in numbers:
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"The loss term {name!r}: a weight must be a finite number >= 0. Received: {number}.")
        totals[name] = math.fsum(numbers)
    return totals


def _above_0(total: Weight, where: Tensor) -> Tensor:
    return torch.as_tensor(total, device=where.device) > 0


def _by_batch(objective: Objective, batch: Batch) -> Totals | None:
    totals = objective.total(batch) if objective.weight is not None else None
    return totals if isinstance(totals, dict) else None


def _terms(terms: object, objective: Objective) -> Terms:
    if isinstance(terms, dict):
        return terms
    if objective.weight is not None:
        raise ValueError(
            "`weight` names loss terms, and the loss is one number. Return {name: loss} from `compute_loss`, or a "
            "number from `weight`."
        )
    raise ValueError(MIXED_TERMS)
