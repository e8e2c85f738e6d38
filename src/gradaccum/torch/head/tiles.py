"""Cross entropy of a linear layer's outputs, which exist a tile of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["cross_entropies"]

NUMBERS = 1 << 24
"""Logits of a tile: 64 MiB in float32."""


def cross_entropies(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, losses: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`losses(logits, target)` of each row, of the logits `linear(x, weight, bias)`.

    Example:
        >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, -100, 3, 2, 2])
        >>> plain = lambda logits, target: F.cross_entropy(logits, target, reduction="none")
        >>> torch.allclose(cross_entropies(x, weight, None, target, plain), plain(x @ weight.T, target), atol=1e-6)
        True
    """
    return _CrossEntropies.apply(x, weight, bias, target, losses)


def _tiles(rows: int, classes: int) -> list[slice]:
    size = max(NUMBERS // classes, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, losses: Any) -> Tensor:
        ctx.save_for_backward(x, weight, bias, target)
        ctx.losses = losses
        with torch.autocast(x.device.type, enabled=False):
            tiles = _tiles(len(x), len(weight))
            return torch.cat([losses(F.linear(x[tile], weight, bias), target[tile]) for tile in tiles])

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
                    losses = ctx.losses(logits, target[tile])
                (slope,) = torch.autograd.grad(losses, logits, gradient[tile])
                if for_x is not None:
                    torch.mm(slope, weight, out=for_x[tile])
                if for_weight is not None and wide is weight.dtype:
                    for_weight.addmm_(slope.T, x[tile])
                elif for_weight is not None:
                    for_weight += slope.T @ x[tile]
                if for_bias is not None:
                    for_bias += slope.sum(0, dtype=wide)
        for_weight = None if for_weight is None else for_weight.to(weight.dtype)
        return for_x, for_weight, None if for_bias is None else for_bias.to(bias.dtype), None, None
