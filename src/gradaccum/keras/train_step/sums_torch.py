"""The sums of a batch's gradients on PyTorch: where they live."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["GradientSums"]


class GradientSums:
    """The sums of gradients: in `.grad` where that has at least 32 bits, else beside it in float32.

    Of variables that are overwritten with their gradient, the largest.
    """

    def __init__(self, variables: list[Any], overwriting: frozenset[int]) -> None:
        self.parameters = [variable.value for variable in variables]
        self.overwriting = overwriting
        half = {index for index, p in enumerate(self.parameters) if p.dtype in (torch.float16, torch.bfloat16)}
        self.beside = sorted(half | overwriting)
        self.sums: dict[int, torch.Tensor] = {}

    def take(self) -> None:
        """Move the gradients of the micro-batch that was just run into sums that are not in `.grad`."""
        for index in self.beside:
            gradient, self.parameters[index].grad = self.parameters[index].grad, None
            if gradient is None:
                continue
            if index not in self.sums:
                self.sums[index] = gradient.float()
            elif index in self.overwriting:
                self.sums[index] = torch.maximum(self.sums[index], gradient.float())
            else:
                self.sums[index] += gradient

    def scaled(self, scale: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The sums, in the order of the variables; None for those that no loss depends on."""
        gradients = [self.sums.get(index, parameter.grad) for index, parameter in enumerate(self.parameters)]
        for index, gradient in enumerate(gradients):
            if scale is not None and gradient is not None and index not in self.overwriting:
                gradient *= scale
        return gradients
