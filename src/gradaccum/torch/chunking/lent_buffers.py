"""The buffers of a chunked module: lent to each of its passes as they were at first, and moved once."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.state import BufferSnapshot, Snapshot
from gradaccum.torch.buffers import Ends, Moves

logger = logging.getLogger("gradaccum")

LOOKED_AT = 1 << 14
"""Bytes of a buffer in host memory that is compared by value."""

_NO_CONTEXT = contextlib.nullcontext()


def _clones(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


class LentBuffers(Moves):
    """Buffers of a chunked module: every forward pass finds copies of them as they were at first, and they move once.

    They move to where the passes took them on average over rows, or as `combine_buffers` says. The former is exact for
    what doesn't depend on the rows (counters, power iterations) and for moving averages of means over rows.
    """

    def __init__(self, modules: Iterable[nn.Module], excluded: Collection[int] = ()) -> None:
        super().__init__()
        owners = {id(module._buffers): module for module in modules}
        self._places = [(m._buffers, n, b) for m in owners.values() for n, b in m._buffers.items() if b is not None]
        self._excluded, self._found = excluded, dict[int, BufferSnapshot]()
        buffers = {id(buffer): buffer for _, _, buffer in self._places}
        memory = [b.untyped_storage().data_ptr() for b in buffers.values() if type(b) is Tensor and not b.is_meta]
        self._copied = copy.deepcopy if len(set(memory)) < len(memory) else _clones  # views go on sharing memory
        self._starts = self._copied({key: buffer.detach() for key, buffer in buffers.items()})
        for holder, name, buffer in self._places:
            if id(buffer) not in self._found:
                self._found[id(buffer)] = found = BufferSnapshot(holder, name, owners[id(holder)])
                found.tensor, found.copy = buffer, self._starts[id(buffer)]
        self._start = Snapshot(modules=[m for m in owners.values() if not isinstance(m, _BatchNorm)])
        self._there = [(m._buffers, {n: b is not None for n, b in m._buffers.items()}) for m in owners.values()]

    def lent(self, rows: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Around one pass: a first pass over so many rows, or, without rows, a repetition that moves nothing."""
        return self._lent(rows) if self._found or self._start.there else _NO_CONTEXT

    @contextlib.contextmanager
    def _without_others(self) -> Iterator[None]:
        """What passes before have deleted, or set to None, isn't there: one that is repeated has found it."""
        others = [
            (holder, name, other, name in there)
            for holder, there in self._there
            for name, other in holder.items()
            if not there.get(name) and (other is not None or name not in there)
        ]
        for holder, name, _, emptied in others:
            if emptied:
                holder[name] = None
            else:
                del holder[name]
        try:
            yield
        finally:
            for holder, name, other, _ in others:
                holder[name] = other

    @contextlib.contextmanager
    def _lent(self, rows: int | None) -> Iterator[None]:
        wanted = [key for key in self._found if rows is None or key not in self._excluded]
        copies = self._copied({key: self._starts[key] for key in wanted})
        versions = {key: lent._version for key, lent in copies.items() if not lent.is_inference()}
        places = [(holder, name, buffer) for holder, name, buffer in self._places if id(buffer) in copies]
        before = [(name in holder, holder.get(name)) for holder, name, _ in places]
        ends, made = Ends(), Ends()
        with self._without_others():
            try:
                for holder, name, buffer in places:
                    holder[name] = copies[id(buffer)]
                yield
            finally:
                for found in self._start.made():
                    made[id(found.owner), found.name] = found, found.owner[found.name], True
                    found.reset()
                for (holder, name, buffer), (there, value) in zip(places, before, strict=True):
                    ends[id(buffer)] = self._found[id(buffer)], holder.get(name), name in holder
                    if there:
                        holder[name] = value
                    else:  # first passes have made it, and the one that is repeated found none
                        holder.pop(name, None)
        if rows is not None:
            edited = [key for key, lent in copies.items() if self._edited(*ends[key][:2], lent, versions.get(key))]
            self.add({**ends, **made}, rows, [*edited, *made])

    def _edited(self, found: BufferSnapshot, value: Tensor | None, lent: Tensor, version: int | None) -> bool:
        # PyTorch's normalisation kernels don't count their moves as in-place edits.
        if value is not lent or found.unversioned or version is None or value._version != version:
            return True
        # What moves through `.data` or NumPy shows in its value alone; elsewhere a look would wait for the device.
        return lent.is_cpu and lent.nbytes <= LOOKED_AT and not torch.equal(lent, found.copy)  # type: ignore[arg-type]  # there is
