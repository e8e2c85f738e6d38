"""A backward pass that starts at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum.on_torch.private import backward_engine

__all__ = ["run_backward"]


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward(tensors, gradients)`, where the gradients are known to fit.

    What torch looks at first, once more for each micro-batch, takes as long as the backward pass of a small layer.

    Args:
        tensors: Where to start.
        gradients: Of each of them, of its shape and dtype, on its device.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> run_backward([weight * 2], [torch.tensor([1.0, 2.0, 3.0])])
        >>> weight.grad
        tensor([2., 4., 6.])
    """
    engine = backward_engine()
    if engine is None or any([type(tensor) is not Tensor for tensor in tensors]):
        torch.autograd.backward(tensors, gradients)
    else:
        engine(tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
