"""Compare the values of many tensors with what they were, by `_foreach` operators; whether versions show edits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Values:
    """The 2-norm and the largest entry of each tensor, two rows: other values show in one of them."""

    def __init__(self, rows: Tensor, sizes: list[int]) -> None:
        self._rows, self._sizes = rows, sizes

    @classmethod
    @torch.no_grad()
    def of(cls, tensors: list[Tensor]) -> Values | None:
        """None of no tensors; `has` says of which it can be told."""
        found: list[Any] = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        if not found:
            return None
        kinds, device = {(t.device, t.dtype) for t in found}, found[0].device
        wide = torch.float64 if any(dtype == torch.float64 for _, dtype in kinds) else torch.float32
        plain = kinds == {(device, wide)}
        rows = [torch._foreach_norm(found, 2, dtype=None if plain else wide), torch._foreach_max(found)]
        stacked = [torch.stack(row if plain else [n.to(device, wide) for n in row]) for row in rows]
        return cls(torch.stack(stacked), [*map(Tensor.numel, tensors)])

    @staticmethod
    def has(tensor: Tensor) -> bool:
        on_mps = tensor.device.type == "mps"
        return not tensor.is_sparse and not on_mps and tensor.numel() > 0 and counts_versions(tensor)

    def differ(self, now: Values | None) -> bool:
        """Whether they are others by now. Waits for the device."""
        before = self._rows
        if now is None or now._rows.shape != before.shape:
            return True
        if torch.equal(before, now._rows):
            return False
        rounding = torch.tensor(self._sizes, dtype=before.dtype, device=before.device).sqrt()  # threads may differ
        rounding *= 4 * torch.finfo(before.dtype).eps
        same = (before - now._rows).abs() <= rounding * before[0]
        return not bool((same | (before == now._rows) | (before.isnan() & now._rows.isnan())).all())


def counts_versions(tensor: Tensor) -> bool:
    """Whether the tensor's version rises when it is edited, and only then. Asked only where something differs.

    Views, such as those of DDP's buckets, share theirs with others, as do parts of a larger tensor, after torch.cat of
    parameters; a DTensor's shard has its own.
    """
    if tensor._is_view() or hasattr(tensor, "to_local") or torch.compiler.is_compiling():
        return False
    return tensor.is_sparse or tensor.untyped_storage().nbytes() <= tensor.nbytes
