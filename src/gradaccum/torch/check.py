"""Prove it: whether micro-batches give the large batch's gradient, and if not, what keeps them from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Equivalence
from gradaccum.core.rounding import IN_FLOAT64
from gradaccum.on_torch.arguments import checked_model
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.schedule import checked_count
from gradaccum.torch.batch_norm import BatchNormChoice, checked_batch_norm
from gradaccum.torch.loss import Objective
from gradaccum.torch.proof import certify
from gradaccum.torch.train_step import GroupsChoice, TrainStep, check_exact, checked_groups, with_groups

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
    groups: GroupsChoice = None,
    batch_norm: str = "warn",
    device: torch.device | str = "cpu",
    tolerance: float = IN_FLOAT64,
    **train_step: Any,
) -> Equivalence:
    """Test whether micro-batches give the large batch's gradient, and name the cause if they don't.

    On a float64 copy, it compares the gradient of the batch at once with that of several ragged partitions of its rows,
    in order and shuffled, and does so again for a second batch drawn from these rows. Random numbers follow their rows,
    so dropout makes no difference. The error of a tensor is `max|a - b| / max|b|`.

    Model, loss, batch, random state and gradients stay as they are. It costs some 20 forward and backward passes, and
    the memory of the large batch in float64. It is evidence for this model and batch, not a proof.

    Args:
        model: The model, in the mode in which it trains.
        batch: One large batch, as the training loop has it; 2 rows or more, better 8.
        loss_fn: As for `TrainStep`.
        compute_loss: As for `TrainStep`.
        micro_batch_size: Rows of the micro-batches in one of the partitions; None or `"auto"`: ragged ones only.
        weight: As for `TrainStep`.
        reduction: As for `TrainStep`.
        batch_dims: As for `TrainStep`.
        groups: As for `TrainStep`.
        batch_norm: As for `TrainStep`: `"exact"` and `"pooled"` run the micro-batches by `TrainStep`, and replace noise
            by its mean; `"frozen"` freezes the large batch's BatchNorm as well.
        device: Where to compute, such as `"cuda"`.
        tolerance: The largest relative error that counts as rounding.
        train_step: `TrainStep`'s other keywords, which don't change exact arithmetic, so one dict serves both.

    Returns:
        A record that prints, with `.ok`, `.max_error`, `.causes`, `.save()` and `.raise_if_different()`.

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
    checked_count(1 if micro_batch_size in (None, "auto") else micro_batch_size, "micro_batch_size")
    if groups is not None:
        check_exact(checked_batch_norm(batch_norm), False, None, groups)
    large = objective.batch(batch)
    return certify(
        objective,
        large if groups is None else with_groups(large, checked_groups(groups)),
        _accumulate,
        device=torch.device(device),
        tolerance=tolerance,
        size=micro_batch_size if isinstance(micro_batch_size, int) else None,
        batch_norm=checked_batch_norm(batch_norm),
    )


def _accumulate(objective: Objective, batch: Batch, sizes: Sequence[int], batch_norm: BatchNormChoice) -> Tensor:
    """What a `TrainStep` leaves, except that the parameters stay where they are."""
    step = TrainStep(
        objective.model,
        torch.optim.SGD([p for p in objective.model.parameters() if p.requires_grad], lr=0.0),
        loss_fn=objective.loss_fn,
        compute_loss=objective.compute_loss,
        micro_batch_size=max(sizes),
        weight=objective.weight,
        reduction=objective.reduction,
        batch_dims=batch.batch_dims,
        groups=batch.groups,
        batch_norm=batch_norm,
        verify=False,
    )
    return step(*batch.tree)
