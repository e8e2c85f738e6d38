"""The losses of a large batch, a micro-batch at a time: evaluates them, and says what each counts for."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch, read_early
from gradaccum.on_torch.oom_retry import RestartWindow
from gradaccum.on_torch.private import run_backward
from gradaccum.torch.loss.named import (
    MIXED_TERMS,
    Entry,
    Terms,
    Totals,
    Weight,
    is_zero,
    ratio,
    read_totals,
    weighed,
    weighted_sum,
    where_any,
    wide,
)
from gradaccum.torch.loss.objective import Objective, one_weight

ROUNDING = 1e-6
"""Relative difference of two sums of the same weights, in other orders."""

_BOTH = "`compute_loss` must return (loss, weight) always or never. Received: both in one batch."

_Number = Callable[[], float] | float
"""On the host, or on its way there."""


class WeightedLoss(NamedTuple):
    """What a micro-batch's forward pass has found."""

    parts: dict[Hashable, tuple[Tensor, Weight, Weight]]
    """By name: the micro-batch's own loss, what its gradient is multiplied by, and what it weighs."""
    told: Weight | None = None  # what a single loss weighs, where the forward pass alone tells
    share: Weight | None = None  # its part of the total, where that is known beforehand
    weightless: Sequence[Tensor] = ()  # losses that weigh nothing, and don't go backward

    @property
    def ends(self) -> list[tuple[Tensor, Weight, Weight]]:
        """The parts that go backward: of several losses not those that are detached."""
        return [part for name, part in self.parts.items() if name is None or part[0].requires_grad]

    @property
    def ran(self) -> bool:
        """Whether there was a forward pass."""
        return bool(self.parts) or bool(self.weightless)


class LossSum:
    """What one loss has added up to."""

    def __init__(self, unit: Weight) -> None:
        self.unit = unit  # what it is to be divided by
        self.losses: list[Entry] = []
        self.weights: dict[int, Weight] = {}  # of its micro-batches


class BatchLosses:
    """Adds up the losses and the gradients of a large batch's micro-batches. A single loss has the name None.

        large batch's loss  =  sum_j  sum_i w_ij l_ij / W_j   with  W_j = sum_i w_ij,  over names j and micro-batches i

    Loss j adds `w_ij / W_j` times its gradient to the sum, or `1 / W_j` times, where losses are sums.

    Where only the forward pass tells what a single loss weighs, `divisor` is what the sums are to be divided by in the
    end. Factors cost nothing: each is where its backward pass starts, in place of 1. Several losses (`named`) have
    their totals from the batch, from a counting pass (`counted`), or, where one micro-batch is the whole batch, from
    its own forward pass.
    """

    attempts = 0  # how often the weights of several losses were other than counted
    waits = False  # for devices, to read weights, as no window restarts by itself
    shares = False  # each micro-batch's part of the total is wanted, where that is known

    # What passes change; `restart` has it as it is here.
    ran = _has_gradient = False
    divisor: Weight | None = None
    """What the summed gradients are to be divided by; None where they are complete as they are."""
    _arriving: Weight = 0.0
    _passes = 0
    _start: tuple[Weight, Tensor] = 0.0, torch.empty(0)
    _factor: Weight | None = None
    """What every loss is multiplied by that is given to `run`; where rows are counted, those of `_times` rows."""
    _same: Weight | None = None
    """What every single loss is multiplied by, where losses are sums."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        total: Weight | Totals | None = None,
        *,
        named: bool = False,
        counted: Totals | None = None,
        rows: float = 0.0,
        unit: Weight | None = None,
        multiples: bool = False,
        weight: float | None = None,
    ) -> None:
        self.objective, self.named, self._batch_rows = objective, named, batch.rows
        self.summed = objective.renew(batch)
        self._counted, self._by_forward, self._rows = counted, named and total is None, rows or float(batch.rows)
        self._given_unit, self._multiples, self._weight = unit, multiples, weight  # of this rank's rows in all
        self.adds = objective.reduction == "sum" or self.summed
        if not named:
            one: Weight | None = one_weight(objective.total(batch) if total is None else total)
            # Sums, of a torch.nn loss or of the user's own, are all multiplied by the same.
            self._knows_total, self._total = one is not None, 1.0 if one is None else one
            self._same = ratio(1.0, self._total) if self.adds or one is None else None
            if objective.weight is None:
                self._factor = self._same
            total = {None: self._total}
        # Where micro-batches divide by what is known without a look at them: by nothing of theirs, or by their rows.
        self._by_rows = not named and self._same is None and objective.divides_by_rows
        self._times = -1.0 if self._by_rows else 1.0
        self._begin(total)  # type: ignore[arg-type]  # a dict, if any

    def restart(self) -> None:
        for name in ("ran", "divisor", "_has_gradient", "_arriving", "_passes"):
            vars(self).pop(name, None)
        self._begin(None if self._by_forward else self.totals)

    def _begin(self, totals: Totals | None) -> None:
        self.totals, self._unit = totals, self._given_unit
        self.sums: dict[Hashable, LossSum] = {}
        if not self.named:
            self.sums[None] = LossSum(self._total)
        # What the window weighs, on the host or on its way there: as forward passes tell, and as was known before.
        self._by_passes: list[_Number] = []
        self._of_means: list[_Number] = []  # what means are over that went backward unread
        self._known: list[_Number] = [t if type(t) is float else read_early(t) for t in (totals or {}).values()]

    # What they add up to.

    @property
    def is_mean(self) -> bool:
        return self.named or self._knows_total or self.divisor is not None

    def multiple(self, weighted: WeightedLoss, rows: int) -> Weight:
        """Ratio of the first micro-batch's summed gradient to its mean gradient; of several losses, an estimate."""
        if self.named:
            return rows / self._rows
        if self.divisor is not None:
            return self.divisor
        return float(rows) if weighted.share is None else weighted.share

    @property
    def empty(self) -> bool:
        """Whether the window weighs nothing. What a device counts has arrived, as its copy began before the passes."""
        weights = self._known if self.divisor is None else self._by_passes
        return not any(map(_read, weights))

    @property
    def sum(self) -> Tensor:
        """What the weighted losses add up to so far, of several in the order of their totals; without a graph."""
        found = {name: weighted_sum(one.losses, one.unit) for name, one in self.sums.items() if one.losses}
        if found and not self.named:
            return found[None]
        parameter, device = next(self.objective.model.parameters(), torch.zeros(())), self.objective.device
        some = next(iter(found.values()), torch.zeros((), dtype=parameter.dtype))
        zero = torch.zeros_like(wide(some), device=device)
        names = list(self.totals or ()) if self.named else []
        return torch.stack([found.get(name, zero).to(device) for name in names]) if names else zero

    @property
    def loss(self) -> Tensor:
        """The large batch's loss so far, without a graph; NaN where it weighs nothing, as 0 / 0 is."""
        return self.finished()[0]

    def finished(self) -> tuple[Tensor, bool, dict[Hashable, Tensor]]:
        """The large batch's loss, and whether it weighs anything; of several losses, the mean of each."""
        loss, weighs = self.sum, not self.empty
        if self.named:
            losses, loss = self.each(loss), loss.sum()
        else:
            losses, loss = {}, loss if self.divisor is None else loss / self.divisor
        if not (weighs and (self.sums if self.named else self.sums[None].losses)):
            loss = torch.full((), float("nan"), device=self.objective.device)
        return loss, weighs, losses

    def each(self, sums: Tensor) -> dict[Hashable, Tensor]:
        """Of several losses, the mean of each over the large batch; NaN where it weighs nothing."""
        pairs = zip(self.totals.items(), sums, strict=True) if self.named and self.totals else ()
        return {
            name: mean.where(torch.as_tensor(total, device=mean.device) > 0, math.nan) for (name, total), mean in pairs
        }

    def check(self) -> None:
        """All micro-batches are in: the weights of several losses must add up to what was counted before."""
        if self.named and self.sums and not self._has_gradient:
            raise ValueError(
                f"None of the losses requires a gradient: {', '.join(map(repr, self.sums))}. Detached losses are "
                "only averaged; another loss must train the model."
            )
        # A mean over nothing is NaN, and so is its gradient, whatever that is multiplied by.
        if self._of_means and not all(map(_read, self._of_means)):
            self.objective.found.empty = True
            raise RestartWindow
        if self._counted is None:
            return
        found = read_totals({name: one.weights.values() for name, one in self.sums.items()})
        for name, total in self._counted.items():
            now = found.get(name, 0.0)
            if math.isclose(now, float(total), rel_tol=ROUNDING):
                continue
            if not self.attempts and self.totals == self._counted:
                self.attempts = 1
                raise RestartWindow
            raise ValueError(
                f"The weights of the loss term {name!r} add up to {float(total):g} in the pass that counts them, and "
                f"to {now:g} in the micro-batches themselves: they are random, or depend on how rows are split. If the "
                "batch determines them, give weight=lambda *batch: {name: number}; else draw random numbers before the "
                "batch is split, and give a fixed `micro_batch_size`."
            )

    # Several ranks.

    def unit_and_weight(self) -> tuple[float, float] | None:
        """The factor that makes the ranks' sums add up, and what this rank's sum weighs then; None: they do already."""
        if self.divisor is None:  # no forward pass has told a weight
            return None if self._weight is None else (float(self._total), self._weight)
        unit = 1.0 if self._unit is None else float(self._unit)
        return unit, float(self.divisor) * unit

    def own_unit(self) -> float:
        """In a backward pass: what its gradients are multiples of; 0 where it is none of a micro-batch that counts."""
        return float(self._arriving)

    def take_unit(self, unit: float) -> float:
        """Have other ranks' unit, in the window's first backward pass. Returns the factor of what arrives there."""
        factor = (self.own_unit() or unit) / unit
        self._unit = self._given_unit = unit
        return factor

    # A micro-batch.

    def run(self, micro_batch: Batch) -> WeightedLoss | None:
        """Both passes of a micro-batch, where its factor is known as mostly; else the forward pass: its loss, weighed.

        Not for a sharded model, or with a GradScaler.
        """
        if self.divisor is not None or (self._factor is None and not self._by_rows):
            return self.forward(micro_batch)
        loss, weight = self.objective.evaluate(micro_batch, self.summed)
        if weight is not None:
            return self._weighed_by_forward(loss, weight)
        if self._by_rows and micro_batch.rows != self._times:
            self._times = float(micro_batch.rows)
            self._factor = ratio(self._times, self._total)
        factor, (before, start) = self._factor, self._start
        assert factor is not None
        # A hook of the user's may have written to it.
        if before is not factor or start.dtype is not loss.dtype or start.device != loss.device or start._version:
            start = self.objective.start(loss, factor)
            self._start = factor, start
        run_backward((loss,), (start,))
        self.ran = True
        self.sums[None].losses.append((loss.detach(), self._times, 0))
        return None

    def forward(self, micro_batch: Batch) -> WeightedLoss:
        """Run the forward pass of a micro-batch and weigh its losses. Changes nothing here: `backward` does."""
        known = self.known(micro_batch)
        if known is not None and self.objective.weight is not None and all(map(is_zero, known.values())):
            return self._of_nothing(micro_batch)
        loss, told = self.objective.evaluate(micro_batch, self.summed)
        return self.weigh(loss, told, known, micro_batch.rows)

    def known(self, micro_batch: Batch) -> Totals | None:
        """What the losses of a micro-batch weigh, as far as the batch tells: by name."""
        objective, known = self.objective, None
        if self.named:
            known = _by_batch(objective, micro_batch)
        elif self.shares or not self.summed:
            known = {None: one_weight(objective.total(micro_batch))}
        if known is not None and self._same is None:
            known = {name: self._noted(weight) for name, weight in known.items()}
        return known

    def weigh(self, loss: Tensor, told: Weight | Terms | None, known: Totals | None, rows: int) -> WeightedLoss:
        """The losses of a micro-batch that `Objective.evaluate` has found, with what is known of their weights."""
        if self.named:
            return self._weighed_by_name(_checked(told, self.objective), known, rows)
        if told is not None:
            return self._weighed_by_forward(loss, told)
        if self.divisor is not None:
            raise ValueError(_BOTH)
        weight = None if known is None else known[None]
        part = None if weight is None or not self._knows_total else ratio(weight, self._total)
        if self._same is not None:
            return WeightedLoss({None: (loss, self._same, 1.0)}, share=part)
        assert part is not None
        assert weight is not None
        return WeightedLoss({None: (where_any(loss, weight), part, weight)}, share=part)

    def factors(self, names: Sequence[Hashable], known: Totals | None, rows: int, *, told: bool) -> list[Weight] | None:
        """What each loss of a micro-batch is multiplied by where its backward pass starts.

        `told`: the forward pass will tell weights, by which losses are multiplied as well. None where this is unknown,
        or a loss weighs nothing: it may be 0 / 0, and so may its gradient be.
        """
        if known is not None and any(map(is_zero, known.values())):
            return None
        if self.named:
            return self._factors_by_name(names, known)
        if told:
            self._unit = float(rows) if self._unit is None and not self.adds else self._unit
            return [ratio(1.0, 1.0 if self._unit is None else self._unit)]
        if self._same is not None:
            return [self._same]
        weight = None if known is None else known[None]
        return None if weight is None else [ratio(weight, self._total)]

    def _factors_by_name(self, names: Sequence[Hashable], known: Totals | None) -> list[Weight] | None:
        totals = self.totals
        if totals is None or any(name not in totals for name in names):
            return None
        weights: Totals = dict.fromkeys(names, 1.0) if known is None or self.adds else known
        return [ratio(weights.get(name, 0.0), totals[name]) for name in names]

    def _of_nothing(self, micro_batch: Batch) -> WeightedLoss:
        return WeightedLoss({}, weightless=self.objective.losses(micro_batch))

    def _noted(self, weight: Any) -> Any:
        """A mean's weight. It stays on its device, which nobody waits for, until one is 0."""
        if not isinstance(weight, Tensor):
            return weight
        if self.waits or self.objective.found.empty:
            return float(weight)
        self._of_means.append(read_early(weight))
        return weight

    def _weighed_by_forward(self, loss: Tensor, weight: Weight | Terms) -> WeightedLoss:
        started = bool(self.sums[None].losses)
        if isinstance(weight, dict):
            if self.objective.weight is not None:
                raise ValueError(f"`weight` must return a number for each of the loss terms {list(weight)}.")
            if started:
                raise ValueError(MIXED_TERMS)
            raise RestartWindow  # as now is known
        if started and self.divisor is None:
            raise ValueError(_BOTH)
        weight = weight if self.adds else self._noted(weight)
        noted = isinstance(weight, Tensor) and not self.adds
        self._by_passes.append(self._of_means[-1] if noted else read_early(weight))
        if is_zero(weight):
            return WeightedLoss({}, weight, weightless=(loss,))
        factor = ratio(1.0 if self.adds else weight, self._unit_of(weight))
        return WeightedLoss({None: (loss if self.adds else where_any(loss, weight), factor, weight)}, weight)

    def _unit_of(self, weight: Weight) -> Weight:
        """What a sum is a multiple of whose weights only the forward passes tell: its first weight."""
        if self._unit is not None:
            return self._unit
        if self.adds and not self._multiples:
            return 1.0
        return torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight

    def _weighed_by_name(self, terms: Terms, known: Totals | None, rows: int) -> WeightedLoss:
        terms = {name: term._replace(weight=self._noted(term.weight)) for name, term in terms.items()}
        found = weighed(terms, known)
        if self.totals is None:
            if rows != self._batch_rows:
                raise RestartWindow
            self.totals = counted(self.objective, [terms])
            self._known = [float(total) for total in self.totals.values()]
        for name in found:
            if name not in self.totals:
                raise ValueError(
                    f"The loss term {name!r} is not among those that were counted: {list(self.totals)}. The same rows "
                    "must have the same terms each time they are evaluated; where one is missing, it weighs 0."
                )
        parts = {
            name: (wide(where_any(loss, weight)), self._factor_of(name, weight), weight)
            for name, (loss, weight) in found.items()
        }
        return WeightedLoss(parts, weightless=[term.loss for name, term in terms.items() if name not in found])

    def _factor_of(self, name: Hashable, weight: Weight) -> Weight:
        """What the gradient of one of several losses is multiplied by."""
        assert self.totals is not None
        return ratio(1.0 if self.adds else weight, self.totals[name])

    def _add(self, name: Hashable, loss: Tensor, weight: Weight) -> None:
        if name not in self.sums:
            assert self.totals is not None
            self.sums[name] = LossSum(self.totals[name])
        self.sums[name].losses.append((loss.detach(), 1.0 if self.adds else weight, self._passes))
        self.sums[name].weights[self._passes] = weight

    def backward(
        self,
        weighted: WeightedLoss,
        scaled: Callable[[Tensor], Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass, if there is one, and count the micro-batch."""
        ends, told = weighted.ends, weighted.told
        if ends:
            if told is not None:  # what arrives of this pass is a multiple of it, should the rest fail
                self._unit = self._unit_of(told)
            self._arriving = 1.0 if told is None or self._unit is None else self._unit
            losses = [loss if scaled is None else scaled(loss) for loss, _, _ in ends]
            starts = [self.objective.start(loss, factor) for loss, (_, factor, _) in zip(losses, ends, strict=True)]
            if len(starts) > 1:  # a hook of the user's may write to one of them
                starts = [start.clone() for start in starts]
            run_backward(losses, starts, retain_graph)
        self.count(weighted, bool(ends))

    def count(self, weighted: WeightedLoss, has_gradient: bool = True) -> None:
        """Count a micro-batch whose gradient, if there is one, is in the sum."""
        told = weighted.told
        self._has_gradient = self._has_gradient or has_gradient
        self.ran = self.ran or weighted.ran
        self._arriving = 0.0
        self._passes += 1
        for name, (loss, _, weight) in weighted.parts.items():
            self._add(name, loss, weight)
        if told is not None:
            unit = 1.0 if self._unit is None else self._unit
            share, self.sums[None].unit = ratio(told, unit), unit
            self.divisor = share if self.divisor is None else self.divisor + share


def _read(number: _Number) -> float:
    return number() if callable(number) else number


def batch_losses(objective: Objective, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
    """With the totals that the batch tells; of several losses else those of a counting pass, if one is needed."""
    if objective.weight is None and not objective.found.terms:  # as mostly
        return BatchLosses(objective, batch)
    if objective.weight is not None:
        totals = _by_batch(objective, batch)
        return BatchLosses(objective, batch, totals, named=totals is not None)
    found = count()
    if not objective.found.terms:  # any more
        return BatchLosses(objective, batch)
    totals = None if found is None else counted(objective, found)
    return BatchLosses(objective, batch, totals, named=True, counted=totals)


def counted(objective: Objective, forwarded: Sequence[Terms]) -> Totals:
    """The totals of the micro-batches of a counting pass."""
    weights: dict[Hashable, list[Weight]] = {}
    for terms in forwarded:
        for name, term in _checked(terms, objective).items():
            weights.setdefault(name, []).append(term.weight)
    return dict(read_totals(weights))


def _by_batch(objective: Objective, batch: Batch) -> Totals | None:
    totals = objective.total(batch) if objective.weight is not None else None
    return totals if isinstance(totals, dict) else None


def _checked(terms: object, objective: Objective) -> Terms:
    if isinstance(terms, dict):
        return terms
    if objective.weight is not None:
        raise ValueError(
            "`weight` names loss terms, and the loss is one number. Return {name: loss} from `compute_loss`, or a "
            "number from `weight`."
        )
    raise ValueError(MIXED_TERMS)
