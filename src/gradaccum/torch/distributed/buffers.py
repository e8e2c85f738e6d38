"""Buffers that an update has moved on some ranks, on those that have run nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.state import BufferSnapshot, put, same
from gradaccum.torch.distributed.channel import Channel

Key = tuple[int, str]
Buffers = Mapping[Key, tuple[dict[str, Any], Mapping[str, BufferSnapshot]]]


@torch.no_grad()
def take_over(
    buffers: Buffers,
    device: torch.device,
    channel: Channel,
    source: int,
    *,
    takes: bool,
) -> None:
    """Have the ranks agree after an update on the buffers on which they agreed before, where some have run nothing.

    Those on which they didn't are each rank's own, as statistics of its rows are: without rows they stay.

    `source`: a rank that has run something.
    """
    moved = _from_rank(channel, source, _moved(buffers) if channel.rank == source else {})
    for key, names in moved.items() if takes else ():
        holder, held = buffers.get(key, ({}, {}))
        for name, (start, end, on_device) in names.items():
            now, before = holder.get(name), held.get(name)
            own = now if before is None else before.tensor if before.copy is None else before.copy
            if (own is not None) if start is None else (own is None or not same(own, start.to(own.device))):
                continue
            put(holder, name, now, end.to(device if on_device else "cpu"))


Moved = dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]]


def _from_rank(channel: Channel, source: int, moved: Moved) -> Moved:
    """What `_moved` has found on a rank, on all of them: as text what there is, and the tensors' bytes in one piece."""
    own = [tensor for names in moved.values() for start, end, _ in names.values() for tensor in (start, end)]
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in own if tensor is not None]
    described = [
        [*key, name, on_device, *(t is not None and [str(t.dtype).removeprefix("torch."), [*t.shape]] for t in pair)]
        for key, names in moved.items()
        for name, (*pair, on_device) in names.items()
    ]
    size = sum(map(len, parts))
    size, described = json.loads(channel.texts(json.dumps([size, described]))[source])
    sent = channel.broadcast(torch.cat(parts) if parts else torch.zeros(size, dtype=torch.uint8), source)
    found, place = Moved(), 0
    for number, path, name, on_device, *both in described:
        tensors: list[Tensor | None] = []
        for one in both:
            if not one:
                tensors.append(None)
                continue
            whole = torch.empty(one[1], dtype=getattr(torch, one[0]))
            whole.reshape(-1).view(torch.uint8).copy_(sent[place : place + whole.nbytes])
            place += whole.nbytes
            tensors.append(whole)
        found.setdefault((number, path), {})[name] = (*tensors, on_device)
    return found


def _moved(buffers: Buffers) -> Moved:
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
