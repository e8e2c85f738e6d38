"""Cross entropy of a linear layer's outputs, which exist a tile of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["Options", "cross_entropies"]

NUMBERS = 1 << 24
"""Logits of a tile: 64 MiB in float32."""


class Options(NamedTuple):
    """What the loss is told, and the dtypes that logits go through on their way to it."""

    class_weights: Tensor | None
    ignore_index: int
    label_smoothing: float
    dtypes: tuple[torch.dtype, ...]


def cross_entropies(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Options) -> Tensor:
    """The cross entropy of each row of `linear(x, weight, bias)`.

    Example:
        >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, -100, 3, 2, 2])
        >>> losses = cross_entropies(x, weight, None, target, Options(None, -100, 0.0, ()))
        >>> torch.allclose(losses, F.cross_entropy(x @ weight.T, target, reduction="none"), atol=1e-6)
        True
    """
    return _CrossEntropies.apply(x, weight, bias, target, options)


def _tiles(rows: int, classes: int) -> Iterator[slice]:
    size = max(NUMBERS // classes, 1)
    return (slice(start, start + size) for start in range(0, rows, size))


def _losses(logits: Tensor, target: Tensor, options: Options) -> Tensor:
    for dtype in options.dtypes:
        logits = logits.to(dtype)
    return F.cross_entropy(
        logits,
        target,
        weight=options.class_weights,
        ignore_index=options.ignore_index,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Options) -> Tensor:
        ctx.save_for_backward(x, weight, bias, target)
        ctx.options = options
        with torch.autocast(x.device.type, enabled=False):
            found = [
                _losses(F.linear(x[tile], weight, bias), target[tile], options) for tile in _tiles(len(x), len(weight))
            ]
        return torch.cat(found) if found else x.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        # Sums over tiles, in float32 where one product would have added up in it.
        wide = torch.float32 if weight.dtype.itemsize == 2 else weight.dtype
        for_x = torch.empty_like(x) if of_x else None
        for_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if of_weight else None
        for_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if of_bias else None
        with torch.autocast(x.device.type, enabled=False):
            for tile in _tiles(len(x), len(weight)):
                logits = F.linear(x[tile], weight, bias).requires_grad_()
                with torch.enable_grad():
                    losses = _losses(logits, target[tile], ctx.options)
                (slope,) = torch.autograd.grad(losses, logits, gradient[tile])
                if for_x is not None:
                    torch.mm(slope, weight, out=for_x[tile])
                if for_weight is not None and wide is weight.dtype:
                    for_weight.addmm_(slope.T, x[tile])
                elif for_weight is not None:
                    for_weight += slope.T @ x[tile]
                if for_bias is not None:
                    for_bias += slope.sum(0, dtype=wide)
        return (
            for_x,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
            None,
        )
