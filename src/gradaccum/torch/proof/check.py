"""The large batch's gradient against that of several partitions of its rows, on a copy in float64."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause, Difference, Equivalence, limits_of
from gradaccum.core.proof import Compared, Comparison, Key, Way, ragged_ways, worst
from gradaccum.core.rounding import IN_FLOAT64, rounding
from gradaccum.core.sizes import Groups, even_sizes
from gradaccum.on_torch import random_state
from gradaccum.on_torch.adapter.arrays import largest
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.random_state import held_generators
from gradaccum.torch.batch_norm import BatchNormChoice
from gradaccum.torch.buffers import gradients_kept
from gradaccum.torch.loss import Objective
from gradaccum.torch.proof.causes import find_causes, hook_cause, input_cause, nondeterminism_cause
from gradaccum.torch.proof.trial import Accumulate, Trial

__all__ = ["certify"]


def certify(
    objective: Objective,
    batch: Batch,
    accumulate: Accumulate | None,
    *,
    device: torch.device,
    tolerance: float = IN_FLOAT64,
    size: int | None = None,
    batch_norm: BatchNormChoice = "warn",
) -> Equivalence:
    """Compare the batch at once with several ragged partitions of its rows, and name what makes a difference."""
    if cause := input_cause(batch):
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
    with torch.inference_mode(False), torch.enable_grad(), random_state.kept(generators), gradients_kept(parameters):
        check = _Check(objective, batch, accumulate, device, tolerance, _ways(batch, size), batch_norm)
        return check.run()


class _Check:
    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        accumulate: Accumulate | None,
        device: torch.device,
        tolerance: float,
        ways: list[Way],
        batch_norm: BatchNormChoice,
    ) -> None:
        def at_once(dtype: torch.dtype | None) -> Comparison:
            self.trial = Trial(objective, batch, accumulate, device=device, dtype=dtype, batch_norm=batch_norm)
            failing = "raise" if self.trial.by_train_step else "differs"
            comparison = Comparison(self.trial, range(batch.rows), ways, failing)  # type: ignore[arg-type]  # one of these
            _ = comparison.large
            return comparison

        self.tolerance, self.ways = tolerance, ways
        try:
            self.comparison = at_once(torch.float64)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("dtype", "Double", "double", "Float", "Half", "BFloat16")):
                raise
            self.comparison = at_once(None)
            reason = str(error).splitlines()[0]
            self.trial.notes.append(f"Computed in the model's own dtype, as it can't in float64 ({reason}).")
            precision = str(self.comparison.large.losses["loss"].dtype)
            self.tolerance = max(self.tolerance, rounding(precision, device.type))
        loss = self.comparison.large.losses["loss"]
        if not loss.isfinite().all():
            raise ValueError(f"The large batch's own loss is {loss.item()}: there is nothing to compare.")

    def run(self) -> Equivalence:
        again = self.comparison.unrepeatable()
        nondeterminism = max(difference.error for difference in again)
        if not nondeterminism <= self.tolerance:
            return self._result(again, [nondeterminism_cause(self.trial, nondeterminism)])
        differences, failing = self._compared()
        error, allowed = max(difference.error for difference in differences), self.trial.tolerance
        if self.tolerance < error <= allowed:
            precision = str(self.trial.rng.precision).removeprefix("torch.")
            self.trial.notes.append(
                f"A part of the model computes in {precision} whatever its parameters' dtype, so {allowed:g} is "
                "allowed for its rounding."
            )
            self.tolerance = allowed
        wrong = self._wrong(differences)
        if not wrong:
            return self._result(differences, [])
        self.trial.rng.check("The model or the loss")
        if self.trial.hooks:
            for handle in [handle for handles in self.trial.hooks.values() for handle in handles]:
                handle.remove()
            self.comparison.restart()
            without, failing = self._compared()
            hooked = [name for name in wrong if name in self.trial.hooks]
            if hooked and not self._wrong(without):
                return self._result(differences, [hook_cause(hooked[0])])
            differences = without
        return self._result(differences, find_causes(self.trial, differences, failing, self.tolerance))

    def _wrong(self, differences: Sequence[Difference]) -> list[str]:
        return [difference.name for difference in differences if not difference.error <= self.tolerance]

    def _compared(self) -> tuple[list[Difference], list[Way]]:
        """Each tensor's largest error over all ways, and the ways that differ, the worst first."""
        self.comparison.differences()
        compared = self._relative_to_terms(self.comparison)
        failing = [(one.error, one.way) for one in compared if not one.error <= self.tolerance]
        # Rows drawn with replacement, so that what ranks or counts rows is put to a second test.
        drawn = self.trial.on(_drawn(self.trial.batch))
        again = Comparison(drawn, range(drawn.batch.rows), [_ways(drawn.batch, None)[-1]], self.comparison.failed)
        try:
            found = self._relative_to_terms(again) if again.differences() is not None else []
        except Exception:  # the loss may have its own idea of which rows go together
            if self.trial.by_train_step:
                raise
            found = []
        for one in found:
            if math.isinf(one.error) and not one.distances:  # as in the exception above
                continue
            compared.append(one)
            if not one.error <= self.tolerance:
                known = drawn.batch.groups is None  # else it may cut the groups of the batch itself
                failing.append((one.error, one.way if known else self.ways[-1]))
        failing.sort(key=lambda entry: -entry[0])
        return worst(d for one in compared for d in one.differences), [way for _, way in failing]

    def _relative_to_terms(self, comparison: Comparison) -> list[Compared]:
        """Where large terms cancel each other, errors are relative to the terms, not to what is left of them."""
        if all(one.error <= self.tolerance for one in comparison.compared):
            return [*comparison.compared]
        trial, eps = comparison.runner, torch.finfo(comparison.large.losses["loss"].dtype).eps
        assert isinstance(trial, Trial)
        moved, parts = comparison.moved(), self._largest_of_parts(trial)
        terms = {key: max(moved.get(key, 0.0) / eps, parts.get(key, 0.0)) for key in {*moved, *parts}}
        return [one if one.error <= self.tolerance else _by_terms(one, terms) for one in comparison.compared]

    def _largest_of_parts(self, trial: Trial) -> dict[Key, float]:
        """The largest number in any micro-batch's loss and gradients: rows may cancel each other whatever rounding."""
        found: dict[Key, float] = {}
        cut = [] if trial.by_train_step else [torch.tensor(order).split(list(sizes)) for order, sizes in self.ways]
        for rows in [rows for parts in cut for rows in parts]:
            try:
                part = trial.on(trial.batch.take(rows)).run(range(len(rows)), [len(rows)])
            except Exception:  # the loss may have its own idea of which rows go together
                continue
            for key, tensor in part.parts():
                if tensor is not None and key[0] != "buffer" and tensor.isfinite().all():
                    found[key] = max(found.get(key, 0.0), largest(tensor))
        return found

    def _result(self, differences: Sequence[Difference], causes: Sequence[Cause]) -> Equivalence:
        gradients: Mapping[str, Tensor | None] = self.comparison.large.gradients
        dtype = next((g.dtype for g in gradients.values() if g is not None), torch.float64)
        notes = [*self.trial.notes]
        if not self.trial.original.model.training:
            notes.append("The model is in eval mode: dropout and BatchNorm were checked as they are there.")
        silent = [name for name, gradient in gradients.items() if gradient is None]
        if silent:
            shown = ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else "")
            notes.append(
                f"No gradient reached {len(silent)} parameters on this batch, so they weren't compared: {shown}."
            )
        return Equivalence(
            tuple(differences),
            self.tolerance,
            tuple(causes),
            rows=self.trial.rows,
            partitions=tuple(tuple(sizes) for _, sizes in self.ways),
            notes=(*notes, *limits_of(self.trial.rows)),
            precision=str(dtype).removeprefix("torch."),
            device=str(self.trial.device),
        )


def _by_terms(one: Compared, terms: Mapping[Key, float]) -> Compared:
    found = []
    for difference in one.differences:
        key = difference.part, difference.name
        distance = one.distances.get(key, math.inf)
        scale = distance / difference.error if difference.error else math.inf
        if terms.get(key, 0.0) > 1000 * scale and math.isfinite(distance):
            difference = dataclasses.replace(difference, error=distance / terms[key])
        found.append(difference)
    return one._replace(differences=found)


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


def _ways(batch: Batch, size: int | None) -> list[Way]:
    """Ways to cut the rows, none of them through rows that belong together: as TrainStep would, and ragged ones."""
    given: list[Way] = []
    if size is not None and size < batch.rows:
        rows = range(batch.rows)
        if batch.groups is None:
            given = [(rows, even_sizes(batch.rows, size))]
        else:
            parts = Groups(batch.groups.tolist()).cut(rows, size)
            given = [([row for part in parts for row in part], [len(part) for part in parts])]
    return [*given, *ragged_ways([unit.tolist() for unit in batch.units()], random.Random(0))]
