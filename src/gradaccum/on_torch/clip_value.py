"""Gradient clipping by value, `clip_grad_value=`: a stage of a window's end."""

from __future__ import annotations

import dataclasses

import torch

from gradaccum.on_torch.foreach import grouped
from gradaccum.on_torch.grad_buffer import WindowTotal


@dataclasses.dataclass(frozen=True)
class ClipValue:
    """As `torch.nn.utils.clip_grad_value_`, once per window, and for sparse gradients, too."""

    limit: float

    @torch.no_grad()
    def __call__(self, total: WindowTotal) -> bool:
        gradients = total.gradients
        for sparse in [g for g in gradients if g.is_sparse]:
            merged = sparse.coalesce()
            merged.values().clamp_(-self.limit, self.limit)
            if merged is not sparse:
                sparse.copy_(merged)
        for group in grouped([g for g in gradients if not g.is_sparse]):
            torch._foreach_clamp_min_(group, -self.limit)
            torch._foreach_clamp_max_(group, self.limit)
        return True
