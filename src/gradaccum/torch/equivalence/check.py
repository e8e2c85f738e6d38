"""Prove it: the gradient of the large batch against that of micro-batches, and the culprit's name where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.equivalence import Cause, Difference, Equivalence
from gradaccum.on_torch import random_state
from gradaccum.on_torch.arguments import checked_model
from gradaccum.on_torch.batch import BatchDims, per_row_leaves
from gradaccum.rounding import IN_FLOAT64, rounding
from gradaccum.schedule import checked_count
from gradaccum.sizes import even_sizes
from gradaccum.torch.batch_norm import BatchNormChoice, checked_batch_norm
from gradaccum.torch.equivalence.causes import find_causes, input_cause, nondeterminism_cause
from gradaccum.torch.equivalence.trial import Outcome, Trial
from gradaccum.torch.loss import Objective

__all__ = ["check_equivalence"]

_IRRELEVANT = (
    "optimizer", "clip_grad_norm", "scaler", "autocast", "accumulate_dtype", "memory_limit", "noise_scale", "verify",
    "sync", "max_tokens",
)  # fmt: skip
"""Keywords of TrainStep that leave exact arithmetic as it is."""


def check_equivalence(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    compute_loss: Callable[..., Any] | None = None,
    micro_batch_size: int | str | None = None,
    weight: Callable[..., Any] | None = None,
    reduction: str = "mean",
    batch_dims: BatchDims = 0,
    batch_norm: str = "warn",
    device: torch.device | str = "cpu",
    tolerance: float = IN_FLOAT64,
    **train_step: Any,
) -> Equivalence:
    """Whether micro-batches give the large batch's gradient, and if not, what keeps them from it.

    On a float64 copy, the gradient of the batch at once is compared with that of several ragged partitions of its
    rows, in order and shuffled; and so for a second batch, drawn from its rows. Random numbers follow their rows, so
    that dropout is no difference. The error of a tensor is `max|a - b| / max|b|`.

    Model, loss, batch, random state and gradients stay as they are. It costs some 20 forward and backward passes, and
    the memory of the large batch in float64. It is evidence for this model and batch, not a proof.

    Args:
        model: The model, in the mode in which it trains.
        batch: One large batch, as the training loop has it; 2 rows or more, better 8.
        loss_fn, compute_loss, weight, reduction, batch_dims: As for `TrainStep`.
        micro_batch_size: Rows of the micro-batches in one of the partitions; None or `"auto"`: ragged ones only.
        batch_norm: As for `TrainStep`: `"exact"` and `"pooled"` have it run the micro-batches, and replace noise by
            its mean; `"frozen"` freezes the large batch's BatchNorm as well.
        device: Where to compute, such as `"cuda"`.
        tolerance: The largest relative error that counts as rounding.
        train_step: `TrainStep`'s other keywords, so that one dict serves both. They don't change exact arithmetic.

    Returns:
        A record with `.ok`, `.max_error`, `.causes`, that prints, `.save()`s and can `.raise_if_different()`.

    Raises:
        TypeError: The model or the loss can't be copied; an unknown keyword.
        ValueError: A batch of one row, a loss without gradient, or one that is not finite on the large batch.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> batch = torch.randn(16, 3), torch.randn(16, 1)
        >>> result = check_equivalence(model, batch, loss_fn=nn.MSELoss())
        >>> result.ok, result.causes[0].where
        (False, '1')
        >>> model[1] = nn.GroupNorm(2, 4)
        >>> check_equivalence(model, batch, loss_fn=nn.MSELoss()).raise_if_different().max_error < 1e-12
        True
    """
    unknown = sorted(train_step.keys() - set(_IRRELEVANT))
    if unknown:
        raise TypeError(f"check_equivalence() got an unexpected keyword argument {unknown[0]!r}.")
    objective = Objective(
        checked_model(model),
        loss_fn=loss_fn,
        compute_loss=compute_loss,
        weight=weight,
        reduction=reduction,
        batch_dims=batch_dims,
    )
    arguments = objective.arguments(batch)
    found = per_row_leaves(arguments, objective.dims(arguments))
    if len({int(leaf.shape[dim]) for _, leaf, dim in found}) > 1:
        cause = input_cause(arguments, objective.dims(arguments), found)
        return Equivalence((), tolerance, (cause,), device=str(device))
    rows = objective.rows(arguments)
    if rows < 2:
        raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {rows}.")
    checked_count(1 if micro_batch_size in (None, "auto") else micro_batch_size, "micro_batch_size")
    size = micro_batch_size if isinstance(micro_batch_size, int) else None
    generators = random_state.all_generators(random_state.every_device())
    with torch.inference_mode(False), random_state.kept(generators), _gradients_kept(model, loss_fn, compute_loss):
        check = _Check(objective, arguments, torch.device(device), tolerance, size, checked_batch_norm(batch_norm))
        try:
            return check.run()
        finally:
            check.trial.replay.rewind()


class _Check:
    def __init__(
        self,
        objective: Objective,
        batch: tuple[Any, ...],
        device: torch.device,
        tolerance: float,
        size: int | None,
        batch_norm: BatchNormChoice,
    ) -> None:
        self.objective, self.batch, self.device, self.tolerance = objective, batch, device, tolerance
        self.how: dict[str, Any] = {"device": device, "batch_norm": batch_norm}
        self.notes: list[str] = []
        self.rows = objective.rows(batch)
        self.partitions = _partitions(self.rows, size)
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
        return self._result(differences, find_causes(self.trial, differences, failing, self.tolerance))

    def _compare(self) -> tuple[list[Difference], list[Sequence[Tensor]]]:
        """Each tensor's largest error over all partitions, and the partitions that differ, the worst first."""
        worst: dict[tuple[str, str], Difference] = {}
        failing: list[tuple[float, Sequence[Tensor]]] = []
        # Rows drawn with replacement, so that what ranks or counts rows is put to a second test.
        drawn = torch.randint(self.rows, (self.rows,), generator=torch.Generator().manual_seed(2))
        second = self.objective.take(self.trial.batch, drawn)
        trials = [(partition, None) for partition in self.partitions] + [(self.partitions[-1], second)]
        for partition, batch in trials:
            try:
                large = self.large if batch is None else self.trial.large(batch)
                if not large.loss.isfinite().all():
                    continue
                differences = self.trial.accumulated(partition, batch).differences(large)
            except Exception:
                if self.trial.by_train_step:
                    raise  # what it says about the model is what there is to know
                if batch is not None:  # the loss may have its own idea of which rows go together
                    continue
                differences = [Difference("loss", float("inf"), "loss")]
            for difference in differences:
                key = difference.part, difference.name
                if key not in worst or not difference.error <= worst[key].error:
                    worst[key] = difference
            error = max(difference.error for difference in differences)
            if not error <= self.tolerance:
                failing.append((error, partition))
        failing.sort(key=lambda entry: -entry[0])
        return list(worst.values()), [partition for _, partition in failing]

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


def _partitions(rows: int, size: int | None) -> list[list[Tensor]]:
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


class _gradients_kept:
    """Leave the gradients of the user's own parameters alone, should a closure reach them past the copy."""

    def __init__(self, *things: Any) -> None:
        self._parameters = [p for thing in things if isinstance(thing, nn.Module) for p in thing.parameters()]

    def __enter__(self) -> None:
        self._gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(self, *exception: Any) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
