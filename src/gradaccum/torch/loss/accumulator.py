"""What a window's micro-batches add up to: the loss and the gradient of the large batch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.oom_retry import RestartWindow
from gradaccum.on_torch.private import run_backward
from gradaccum.torch.loss.divisors import Weight, is_zero, ratio, times, where_any
from gradaccum.torch.loss.objective import Objective, one_weight
from gradaccum.torch.loss.terms import MIXED_TERMS

__all__ = ["LossAccumulator", "WeightedLoss"]


class WeightedLoss(NamedTuple):
    """One micro-batch's share of the large batch's loss: `factor * loss`."""

    loss: Tensor | None
    """The micro-batch's own loss; None where it weighs nothing, so that there is nothing to add."""
    factor: Weight = 1.0
    """What its loss and its gradient are multiplied by."""
    weight: Weight | None = None
    """What `compute_loss` returned as its weight; None where the total is known beforehand."""
    share: Weight | None = None
    """Its part of that total; None where there is none."""
    weightless: Tensor | None = None
    """The loss of a micro-batch that weighs nothing, if it had a forward pass."""
    terms: tuple[dict[Hashable, Tensor], dict[Hashable, Weight]] | None = None
    """Of several losses, what each adds to the large batch's, and what it weighs."""


class LossAccumulator:
    """Adds up the losses and the gradients of a window's micro-batches.

    Where the total weight is known beforehand, the weighted losses add up to the large batch's loss and gradient as
    they are. Where only the forward pass tells, they are kept in multiples of the first weight, and `divisor` is what
    the sums are to be divided by in the end.

    The factors cost nothing: each is where its backward pass starts, in place of 1. Losses are added up at once where
    that waits for no device, and elsewhere when somebody asks for their sum.

    Example:
        >>> objective = Objective(torch.nn.Linear(3, 2), loss_fn=torch.nn.CrossEntropyLoss())
        >>> batch = objective.batch((torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 0, 1])))
        >>> window = LossAccumulator(objective, batch)
        >>> for rows in (slice(0, 4), slice(4, 6)):
        ...     weighted = window.forward(batch.take(rows))
        ...     window.backward(weighted, weighted.loss)
        ...     window.add(weighted)
        >>> torch.testing.assert_close(window.loss, objective.whole(batch).detach())
    """

    attempts = 0
    """As of a window of several losses."""
    ran = False
    """Whether a micro-batch has run: what weighs nothing may be left out."""
    retain_graph = False
    """Whether parts of the graphs go backward once more after the loss has."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        total: Weight | None = None,
        unit: Weight | None = None,
        multiples: bool = False,
    ) -> None:
        objective.renew()
        self.objective = objective
        self.total = one_weight(objective.total(batch)) if total is None else total
        self._summed = objective.reduction == "mean" and objective.weight is None and objective.by_targets(batch)
        # Sums, of a torch.nn loss or of the user's own, are all multiplied by the same.
        self._one = None if self.total is None else ratio(1.0, self.total)
        self._given_unit, self._multiples = unit, multiples
        self._adds = self._summed or objective.reduction == "sum"
        self.restart()

    def restart(self) -> None:
        """Forget the micro-batches that were added."""
        self.ran = False
        self._losses: dict[Any, tuple[Weight, list[Tensor]]] = {}
        self._read = 0.0
        self._dtype: torch.dtype | None = None
        self._divisor: Weight | None = None
        self._unit, self._rescaled = self._given_unit, 1.0
        self._arriving: Weight = 0.0

    @property
    def divisor(self) -> Weight | None:
        """What the summed gradients are to be divided by; None where they are complete as they are."""
        return self._divisor

    @property
    def is_mean(self) -> bool:
        """Whether the finished gradient is that of a mean, not of a sum."""
        return self.total is not None or self._divisor is not None

    def multiple(self, weighted: WeightedLoss, rows: int) -> Weight:
        """Ratio of the first micro-batch's summed gradient to its mean gradient."""
        if self._divisor is not None:
            return self._divisor
        return float(rows) if weighted.share is None else weighted.share

    @property
    def empty(self) -> bool:
        """Whether the window weighs nothing, as far as that is known without waiting for a device."""
        return is_zero(self.total if self._divisor is None else self._divisor)

    @property
    def loss(self) -> Tensor:
        """The large batch's loss so far, without a graph; NaN where it weighs nothing, as 0 / 0 is."""
        if (self._dtype is None and not self._losses) or self.empty:
            return torch.full((), float("nan"), device=self.objective.device)
        if self._divisor is not None:
            return self.sum / self._divisor
        if isinstance(self.total, Tensor):
            loss = self.sum
            return torch.where(self.total.to(loss.device) > 0, loss, float("nan"))
        return self.sum

    @property
    def losses(self) -> dict[Hashable, Tensor]:
        """Each term's mean, where there are several."""
        return {}

    def check(self) -> None:
        """All micro-batches are in: nothing was counted before."""

    def unit_and_weight(self) -> tuple[float, float] | None:
        """For several ranks: the factor that makes their sums add up, and what this rank's sum weighs then.

        None where the total was known beforehand, so that the sums of all ranks add up as they are.
        """
        if self._divisor is None:
            return None
        unit = 1.0 if self._unit is None else float(self._unit)
        return unit, float(self._divisor) * unit

    def own_unit(self) -> float:
        """In a backward pass: what its gradients are multiples of; 0 where it is none of a micro-batch that counts."""
        return float(self._arriving)

    def take_unit(self, unit: float) -> float:
        """Have other ranks' unit, in the window's first backward pass. Returns the factor of what arrives there."""
        self._rescaled = (self.own_unit() or unit) / unit
        self._unit = self._given_unit = unit
        return self._rescaled

    @property
    def sum(self) -> Tensor:
        """The sum of the weighted losses so far, without a graph."""
        if self._dtype is not None:
            return torch.scalar_tensor(self._read, dtype=self._dtype)
        if not self._losses:
            parameter = next(self.objective.model.parameters(), torch.zeros(()))
            return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return _added([times(_added(losses), factor) for factor, losses in self._losses.values()])

    def forward(self, micro_batch: Batch, share: bool = False) -> WeightedLoss:
        """Run the forward pass of a micro-batch and weigh its loss. Changes nothing here: `add` does."""
        objective = self.objective
        known = None if self._summed and not share else one_weight(objective.total(micro_batch))
        if objective.weight is not None and is_zero(known):
            return WeightedLoss(None)
        loss, weight = objective.evaluate(micro_batch, self._summed)
        if isinstance(weight, dict):
            if objective.weight is not None:
                raise ValueError(f"`weight` must return a number for each of the loss terms {list(weight)}.")
            if self._losses or self._dtype is not None:
                raise ValueError(MIXED_TERMS)
            raise RestartWindow  # as now is known
        if weight is not None:
            if is_zero(weight):
                return WeightedLoss(None, weight=weight, weightless=loss)
            if self._adds and not self._multiples:
                return WeightedLoss(loss, weight=weight)
            unit = self._unit if self._unit is not None else _unit(weight)
            if self._adds:
                return WeightedLoss(loss, ratio(1.0, unit), weight=weight)
            return WeightedLoss(where_any(loss, weight), ratio(weight, unit), weight=weight)
        if self._divisor is not None:
            raise ValueError("`compute_loss` must return (loss, weight) always or never. Received: both in one batch.")
        if self._one is None:
            return WeightedLoss(loss)
        assert self.total is not None
        if known is None:
            return WeightedLoss(loss, self._one)
        part = ratio(known, self.total)
        if self._summed or objective.reduction == "sum":
            return WeightedLoss(loss, self._one, share=part)
        return WeightedLoss(where_any(loss, known), part, share=part)

    def backward(self, weighted: WeightedLoss, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch."""
        if weighted.weight is not None and self._unit is None and (self._multiples or not self._adds):
            self._unit = _unit(weighted.weight)  # what arrives of this pass is a multiple of it, should the rest fail
        self._arriving = 1.0 if weighted.weight is None or self._unit is None else self._unit
        starts, key = self.objective.starts, (_key(weighted.factor), loss.dtype, loss.device)
        if key not in starts:
            start = times(torch.ones_like(loss, requires_grad=False), weighted.factor)
            starts[key] = weighted.factor, start  # with the factor, so that its id stays its own
        run_backward([loss], [starts[key][1]], retain_graph=self.retain_graph)

    def add(self, weighted: WeightedLoss) -> None:
        """Count a micro-batch whose gradient has arrived."""
        self.ran = self.ran or weighted.loss is not None or weighted.weightless is not None
        loss, factor, self._arriving = weighted.loss, weighted.factor, 0.0
        if self._rescaled != 1.0:
            factor, self._rescaled = factor * self._rescaled, 1.0
        if loss is not None and type(loss) is Tensor and loss.is_cpu:
            self._read += loss.item() * float(factor)
            self._dtype = loss.dtype
        elif loss is not None:
            key = _key(factor)
            if key not in self._losses:
                self._losses[key] = factor, []
            self._losses[key][1].append(loss.detach())
        weight = weighted.weight
        if weight is not None:
            share = weight if self._unit is None else ratio(weight, self._unit)
            self._divisor = share if self._divisor is None else self._divisor + share


def _unit(weight: Weight) -> Weight:
    return torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight


def _added(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _key(factor: Weight) -> Any:
    """What tells factors apart without waiting for a device."""
    return id(factor) if isinstance(factor, Tensor) else factor
