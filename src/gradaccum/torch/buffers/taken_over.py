"""Buffers of a rank that has run nothing in an update in which others have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.buffers import HeldBuffer, put, same

__all__ = ["take_over"]

Key = tuple[int, str]
Buffers = Mapping[Key, tuple[dict[str, Any], Mapping[str, HeldBuffer]]]


@torch.no_grad()
def take_over(
    buffers: Buffers,
    device: torch.device,
    broadcast: Callable[[Any], Any],
    *,
    gives: bool,
    takes: bool,
) -> None:
    """Have the ranks agree after an update on the buffers on which they agreed before.

    Those on which they didn't are each rank's own, as statistics of its rows are: without rows they stay.

    Args:
        buffers: By module: what holds its buffers, and how they were when the update began.
        device: Where the model is.
        broadcast: Returns the object of the rank that gives. All ranks call this.
        gives: This rank is the one that gives.
        takes: This rank has run nothing.
    """
    moved: dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]] = broadcast(_moved(buffers) if gives else None)
    for key, names in moved.items() if takes else ():
        holder, held = buffers.get(key, ({}, {}))
        for name, (start, end, on_device) in names.items():
            now, before = holder.get(name), held.get(name)
            own = now if before is None else before.tensor if before.copy is None else before.copy
            if (own is not None) if start is None else (own is None or not same(own, start.to(own.device))):
                continue
            put(holder, name, now, end.to(device if on_device else "cpu"))


def _moved(buffers: Buffers) -> dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]]:
    """Where an update has moved buffers from and to, in host memory, and whether they live elsewhere."""
    found: dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]] = {}
    for key, (holder, held) in buffers.items():
        for name, now in holder.items():
            before = held.get(name)
            start = None if before is None else before.copy
            if type(now) is not Tensor or (before is not None and (start is None or same(now, start))):
                continue
            found.setdefault(key, {})[name] = None if start is None else start.cpu(), now.detach().cpu(), not now.is_cpu
    return found
