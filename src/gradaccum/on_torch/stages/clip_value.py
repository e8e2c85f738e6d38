"""Clip the finished gradient entry by entry: `clip_grad_value=`."""

from __future__ import annotations

from gradaccum.on_torch.foreach import clip_value_
from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["ClipValue"]


class ClipValue:
    """As `torch.nn.utils.clip_grad_value_`, once per window."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, total: WindowTotal) -> bool:
        clip_value_(total.gradients, self._limit)
        return True
