"""Clip the finished gradient by its norm: `clip_grad_norm=`."""

from __future__ import annotations

from gradaccum.on_torch.foreach import clip_norm_
from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["ClipNorm"]


class ClipNorm:
    """As `torch.nn.utils.clip_grad_norm_`, once per window."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, total: WindowTotal) -> bool:
        total.grad_norm = clip_norm_(total.gradients, self._limit)
        return True
