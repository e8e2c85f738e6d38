"""The large batch's gradient against that of several partitions of its rows, on a copy in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause, Difference, Equivalence
from gradaccum.core.rounding import IN_FLOAT64, rounding
from gradaccum.core.sizes import Groups, even_sizes
from gradaccum.on_torch import random_state
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.held import held_generators
from gradaccum.torch.batch_norm import BatchNormChoice
from gradaccum.torch.buffers import gradients_kept
from gradaccum.torch.equivalence.causes import find_causes, hook_cause, input_cause, nondeterminism_cause
from gradaccum.torch.equivalence.outcome import Outcome, largest, worst
from gradaccum.torch.equivalence.trial import Accumulate, Trial
from gradaccum.torch.loss import Objective

__all__ = ["certify"]


def certify(
    objective: Objective,
    batch: Batch,
    accumulate: Accumulate,
    *,
    device: torch.device,
    tolerance: float = IN_FLOAT64,
    size: int | None = None,
    batch_norm: BatchNormChoice = "warn",
) -> Equivalence:
    """Compare the batch at once with several ragged partitions of its rows, and name what makes a difference.

    Args:
        objective: The user's own; it is left as found.
        batch: One large batch.
        accumulate: Runs micro-batches as training does.
        device: Where to compute.
        tolerance: The largest relative error that counts as rounding.
        size: Rows of the micro-batches in one of the partitions; None: ragged ones only.
        batch_norm: As for `TrainStep`.

    Raises:
        TypeError, ValueError: As `gradaccum.torch.check_equivalence`.
    """
    if len({int(leaf.shape[dim]) for _, leaf, dim in batch.leaves}) > 1:
        cause = input_cause(batch.tree, batch.batch_dims, batch.leaves)
        return Equivalence((), tolerance, (cause,), device=str(device))
    if batch.rows < 2:
        raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {batch.rows}.")
    if len(batch.units()) < 2:
        raise ValueError(f"The batch must have at least 2 groups, to be split. Received: one, of {batch.rows} rows.")
    generators = random_state.all_generators(random_state.every_device())
    generators += held_generators(objective.model, objective.loss_fn, objective.compute_loss, objective.weight)
    # The user's own have theirs, should a closure reach them past the copy.
    modules = [o for o in (objective.model, objective.loss_fn, objective.compute_loss) if isinstance(o, nn.Module)]
    parameters = [p for module in modules for p in module.parameters()]
    with torch.inference_mode(False), random_state.kept(generators), gradients_kept(parameters):
        comparison = _Certificate(objective, batch, accumulate, device, tolerance, size, batch_norm)
        try:
            return comparison.run()
        finally:
            comparison.trial.replay.rewind()


class _Certificate:
    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        accumulate: Accumulate,
        device: torch.device,
        tolerance: float,
        size: int | None,
        batch_norm: BatchNormChoice,
    ) -> None:
        self.objective, self.batch, self.device, self.tolerance = objective, batch, device, tolerance
        self.how: dict[str, Any] = {"accumulate": accumulate, "device": device, "batch_norm": batch_norm}
        self.notes: list[str] = []
        self.rows = batch.rows
        self.partitions = _partitions(batch, size)
        self.trial, self.large = self._trial()
        if not self.large.loss.isfinite().all():
            raise ValueError(f"The large batch's own loss is {self.large.loss.item()}: there is nothing to compare.")

    def _trial(self, neutral: bool = False) -> tuple[Trial, Outcome]:
        """The trial, in float64 where the model can."""
        try:
            trial = Trial(self.objective, self.batch, neutral=neutral, **self.how)
            return trial, trial.large()
        except RuntimeError as error:
            if not any(word in str(error) for word in ("dtype", "Double", "double", "Float", "Half", "BFloat16")):
                raise
            trial = Trial(self.objective, self.batch, dtype=None, neutral=neutral, **self.how)
            large = trial.large()
            self.notes.append(
                f"Computed in the model's own dtype, as it can't in float64 ({str(error).splitlines()[0]})."
            )
            self.tolerance = max(self.tolerance, rounding(str(large.loss.dtype), self.device.type))
            return trial, large

    def run(self) -> Equivalence:
        again = self.large.differences(self.trial.large())
        nondeterminism = max(difference.error for difference in again)
        if not nondeterminism <= self.tolerance:
            return self._result(again, [nondeterminism_cause(self.trial, nondeterminism)])
        differences, failing = self._compare()
        if self.trial.replay.unreplayed:
            what = ", ".join(sorted(self.trial.replay.unreplayed))
            self.notes.append(
                f"Random numbers that belong to no row ({what}) were replaced by their mean, dropout by nothing."
            )
            self.trial.replay.rewind()
            self.trial, self.large = self._trial(neutral=True)
            differences, failing = self._compare()
        self._allow_for_rounding(differences)
        if all(difference.error <= self.tolerance for difference in differences):
            return self._result(differences, [])
        self.trial.replay.check("The model or the loss")
        if self.trial.hooks:
            wrong = [difference.name for difference in differences if not difference.error <= self.tolerance]
            hooked = [name for name in wrong if name in self.trial.hooks]
            for handle in [handle for handles in self.trial.hooks.values() for handle in handles]:
                handle.remove()
            self.large = self.trial.large()
            without, failing_without = self._compare()
            if hooked and all(difference.error <= self.tolerance for difference in without):
                return self._result(differences, [hook_cause(hooked[0])])
            differences, failing = without, failing_without
        return self._result(differences, find_causes(self.trial, differences, failing, self.tolerance))

    def _compare(self) -> tuple[list[Difference], list[Sequence[Tensor]]]:
        """Each tensor's largest error over all partitions, and the partitions that differ, the worst first."""
        found: list[Difference] = []
        failing: list[tuple[float, Sequence[Tensor]]] = []
        # Rows drawn with replacement, so that what ranks or counts rows is put to a second test.
        second = _drawn(self.trial.batch)
        trials = [(partition, None) for partition in self.partitions] + [(_partitions(second, None)[-1], second)]
        for partition, batch in trials:
            try:
                large = self.large if batch is None else self.trial.large(batch)
                if not large.loss.isfinite().all():
                    continue
                outcome = self.trial.accumulated(partition, batch)
                differences = outcome.differences(large)
                if not max(difference.error for difference in differences) <= self.tolerance:
                    differences = self._relative_to_terms(differences, outcome, large, batch)
            except Exception:
                if self.trial.by_train_step:
                    raise  # what it says about the model is what there is to know
                if batch is not None:  # the loss may have its own idea of which rows go together
                    continue
                differences = [Difference("loss", float("inf"), "loss")]
            found += differences
            error = max(difference.error for difference in differences)
            if not error <= self.tolerance:
                known = batch is None or batch.groups is None  # else it may cut the groups of the batch itself
                failing.append((error, partition if known else self.partitions[-1]))
        failing.sort(key=lambda entry: -entry[0])
        return worst(found), [partition for _, partition in failing]

    def _relative_to_terms(
        self,
        differences: list[Difference],
        outcome: Outcome,
        large: Outcome,
        batch: Batch | None,
    ) -> list[Difference]:
        """Where large terms cancel each other, errors are relative to the terms, not to what is left of them."""
        moved = large.moved_by_last_bits(self.trial.parameters, lambda: self.trial.large(batch))
        eps, distances = torch.finfo(large.loss.dtype).eps, outcome.distances(large)
        parts = self._largest_of_parts(self.trial.batch if batch is None else batch)
        found = []
        for difference in differences:
            key = difference.part, difference.name
            distance, terms = distances.get(key, math.inf), max(moved.get(key, 0.0) / eps, parts.get(key, 0.0))
            scale = distance / difference.error if difference.error else math.inf
            if terms > 1000 * scale and math.isfinite(distance):
                difference = dataclasses.replace(difference, error=distance / terms)
            found.append(difference)
        return found

    def _largest_of_parts(self, batch: Batch) -> dict[tuple[str, str], float]:
        """The largest number in any micro-batch's loss and gradients: rows may cancel each other whatever rounding."""
        sizes: dict[tuple[str, str], float] = {}
        parts = [] if self.trial.by_train_step else [rows for partition in self.partitions for rows in partition]
        for rows in parts:
            try:
                part = self.trial.accumulated([torch.arange(len(rows))], batch.take(rows))
            except Exception:  # the loss may have its own idea of which rows go together
                continue
            gradients = {("gradient", name): gradient for name, gradient in part.gradients.items()}
            for key, tensor in {("loss", "loss"): part.loss, **gradients}.items():
                if tensor is not None and tensor.isfinite().all():
                    sizes[key] = max(sizes.get(key, 0.0), largest(tensor))
        return sizes

    def _allow_for_rounding(self, differences: Sequence[Difference]) -> None:
        error = max(difference.error for difference in differences)
        precision = str(self.trial.replay.precision).removeprefix("torch.")
        allowed = rounding(precision, self.device.type)
        if self.tolerance < error <= allowed:
            self.notes.append(
                f"A part of the model computes in {precision} whatever its parameters' dtype, so {allowed:g} is "
                "allowed for its rounding."
            )
            self.tolerance = allowed

    def _result(self, differences: Sequence[Difference], causes: Sequence[Cause]) -> Equivalence:
        dtype = next((g.dtype for g in self.large.gradients.values() if g is not None), torch.float64)
        return Equivalence(
            tuple(differences),
            self.tolerance,
            tuple(causes),
            rows=self.rows,
            partitions=tuple(tuple(len(rows) for rows in partition) for partition in self.partitions),
            notes=(*self.notes, *self._limits()),
            precision=str(dtype).removeprefix("torch."),
            device=str(self.device),
        )

    def _limits(self) -> list[str]:
        """What this check could not see."""
        limits = []
        model: Any = self.objective.model
        if not model.training:
            limits.append("The model is in eval mode: dropout and BatchNorm were checked as they are there.")
        silent = [name for name, gradient in self.large.gradients.items() if gradient is None]
        if silent:
            shown = ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else "")
            limits.append(
                f"No gradient reached {len(silent)} parameters on this batch, so they weren't compared: {shown}."
            )
        if self.rows < 4:
            limits.append(f"{self.rows} rows allow few partitions: a batch of 8 or more says more.")
        limits.append(
            "This is evidence from one batch, not a proof: what happens only with other data, other sizes or at "
            "another time in training can't be excluded."
        )
        return limits


def _drawn(batch: Batch) -> Batch:
    """As many rows, or groups of rows, drawn from the batch with replacement."""
    units = batch.units()
    drawn = torch.randint(len(units), (len(units),), generator=torch.Generator().manual_seed(2)).tolist()
    while sum(len(units[place]) for place in drawn) > batch.rows:
        drawn.pop()
    second = batch.take(torch.cat([units[place] for place in drawn]))
    if batch.groups is not None:  # one that was drawn twice is two
        sizes = torch.tensor([len(units[place]) for place in drawn])
        second.groups = torch.arange(len(drawn)).repeat_interleave(sizes)
    return second


def _partitions(batch: Batch, size: int | None) -> list[list[Tensor]]:
    """Ways to cut the rows, none of them through rows that belong together."""
    if batch.groups is None:
        return _partitions_of(batch.rows, size)
    units, groups = batch.units(), Groups(batch.groups.tolist())
    partitions = [
        [torch.cat([units[place] for place in part.tolist()]) for part in partition]
        for partition in _partitions_of(len(units), None)
    ]
    if size is not None and size < batch.rows:
        partitions.insert(0, [torch.tensor(part) for part in groups.cut(range(batch.rows), size)])
    return partitions


def _partitions_of(rows: int, size: int | None) -> list[list[Tensor]]:
    """Ways to cut the rows: as TrainStep would, ragged in order, ragged and shuffled, small pieces."""
    generator = torch.Generator().manual_seed(0)
    in_order, shuffled = torch.arange(rows), torch.randperm(rows, generator=generator)
    plans: list[tuple[Tensor, list[int]]] = []
    if size is not None and size < rows:
        plans.append((in_order, even_sizes(rows, size)))
    plans.append((in_order, _ragged(rows, 2, generator)))
    plans.append((shuffled, _ragged(rows, 3, generator)))
    if rows >= 8:
        plans.append((in_order, _ragged(rows, min(rows // 2, 7), generator)))
    return [list(order.split(sizes)) for order, sizes in plans]


def _ragged(rows: int, parts: int, generator: torch.Generator) -> list[int]:
    """Random sizes, each of two rows or more where there are enough, not all the same where that is possible."""
    least = 2 if rows >= 4 else 1
    parts = max(1, min(parts, rows // least))
    sizes = [least] * parts
    for _ in range(rows - least * parts):
        # Skewed towards the first parts, so that weights of all sizes occur.
        pick = int(torch.multinomial(1.0 / torch.arange(1, parts + 1), 1, generator=generator))
        sizes[pick] += 1
    if parts > 1 and len(set(sizes)) == 1 and sizes[-1] > least:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes
