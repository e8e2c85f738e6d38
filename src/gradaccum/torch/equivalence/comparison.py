"""How far apart two tensors are."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["largest", "relative_error"]


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """`max|actual - expected| / max|expected|`; inf for another shape, or where only one of both is finite.

    Args:
        actual: What was computed.
        expected: What it should be.
        floor: Smallest scale to divide by, for tensors that are zero but for rounding.

    Example:
        >>> import torch
        >>> relative_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
        0.125
    """
    if actual.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if not (expected.is_floating_point() or expected.is_complex()):
        actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not actual.isfinite().equal(finite):
        return math.inf
    if not finite.any():
        return 0.0
    difference = (actual - expected)[finite].abs().max().item()
    scale = max(largest(expected[finite]), floor)
    return difference / scale if scale else (math.inf if difference else 0.0)


def largest(tensor: Tensor) -> float:
    """`max|tensor|`; 0 without entries."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0
