"""Numbers and gradients of several ranks, through the Trainer's strategy."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import Tensor

__all__ = ["mean", "over_ranks", "reduce_"]


def over_ranks(trainer: Trainer, number: Tensor, how: str) -> Tensor:
    """A tensor's "sum", "mean" or "max" over the ranks; itself where there is one."""
    if trainer.world_size == 1:
        return number
    return trainer.strategy.reduce(number.to(trainer.strategy.root_device), reduce_op=how)


def mean(trainer: Trainer, gradients: list[Tensor | None], parameters: list[Tensor]) -> list[Tensor | None]:
    """Gradients' means over the ranks; None where no rank has one."""
    present = torch.tensor([float(gradient is not None) for gradient in gradients])
    anywhere = over_ranks(trainer, present, "sum").tolist()
    return [
        over_ranks(trainer, torch.zeros_like(p) if g is None else g, "mean") if there else None
        for g, p, there in zip(gradients, parameters, anywhere, strict=True)
    ]


def reduce_(trainer: Trainer, parameters: list[Tensor]) -> None:
    """Bring the gradients to their means over the ranks."""
    means = mean(trainer, [p.grad for p in parameters], parameters)
    for parameter, gradient in zip(parameters, means, strict=True):
        parameter.grad = gradient
