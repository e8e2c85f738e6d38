"""Buffers that several passes move from one start: each pass finds them as they were, and they move once, together."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.state import BufferDicts, BufferSnapshot, put, same
from gradaccum.torch.buffers.rules import ruled, rules_of

__all__ = ["LentBuffers", "WindowBuffers", "take_over"]

LOOKED_AT = 1 << 14
"""Bytes of a buffer in host memory that is compared by value."""

_NO_CONTEXT = contextlib.nullcontext()


class _Moved:
    """One buffer that passes move, or make, each from the same start.

    mean:   start + sum_i n_i (end_i - start) / N        with the rows n_i of pass i, and N = sum_i n_i
    """

    def __init__(self, buffer: BufferSnapshot, rows: int) -> None:
        self.buffer, self.start, self._rows = buffer, buffer.copy, rows
        self.rule = rules_of(buffer.module).get(buffer.name, "mean")
        self._together = _exactly(self.start)
        self._ends: list[Tensor] = []
        self._dtype: torch.dtype | None = None

    def add(self, end: Tensor | None, rows: int) -> None:
        """A pass over so many rows led here; None: it has deleted the buffer, or not made it."""
        self._rows += rows
        if end is None:
            self._together = None if self.start is not None else self._together
        elif callable(self.rule):
            self._ends.append(end.detach().clone())
        else:
            self._dtype = end.dtype
            end, so_far = _exactly(end.detach()), self._together
            assert end is not None
            if rows == self._rows or so_far is None or not _same_kind(end, so_far):  # the first, or no arithmetic leads
                self._together = end.clone()  # from one to the other
            else:
                self._together = _RULES[self.rule](_exactly(self.start), so_far, end, rows / self._rows)

    def move(self) -> None:
        """Have the buffer where all passes lead together; there is none any more where they have deleted it."""
        buffer, end = self.buffer, self._together
        if callable(self.rule):
            end = ruled(buffer.module, buffer.name, self.rule, self.start, self._ends) if self._ends else None
        elif end is not None and self._dtype is not None:
            end = end.to(self._dtype)
        if end is not None:
            put(buffer.owner, buffer.name, buffer.tensor, end)
        elif buffer.name in buffer.owner and buffer.tensor is not None:
            del buffer.owner[buffer.name]


def _mean(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    if not (end.is_floating_point() or end.is_complex()):
        return end.clone()
    # Where nothing differs nothing changes, so that infinities and constants stay what they are.
    return torch.where(end == so_far, so_far, so_far + (end - so_far) * share)


def _sum(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    if end.dtype == torch.bool:
        return so_far | end
    return so_far + (end if start is None or not _same_kind(end, start) else end - start)


def _once(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    return end.clone() if start is not None and _same_kind(so_far, start) and torch.equal(so_far, start) else so_far


_RULES: dict[str, Callable[[Tensor | None, Tensor, Tensor, float], Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "once": _once,
    "max": lambda start, so_far, end, share: torch.maximum(so_far, end),
}
"""Where passes lead together, given their start, where those before lead, where one leads, and its share of rows."""


def _exactly(value: Tensor | None) -> Tensor | None:
    """As it is; float8, which has no arithmetic of its own, as float32."""
    narrow = value is not None and value.is_floating_point() and value.itemsize == 1
    return value.float() if narrow else value  # type: ignore[union-attr]  # there is one


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)


class _Moves:
    """Buffers that passes move, each from the same start."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Passes begin."""
        self._moves: dict[Hashable, _Moved] = {}
        self._rows = 0

    @torch.no_grad()
    def add(
        self, ends: Mapping[Hashable, tuple[BufferSnapshot, Tensor | None]], rows: int, new: Iterable[Hashable]
    ) -> None:
        """A pass over so many rows led here, and moved those that are `new`; others are where they were."""
        for key in new:
            if key not in self._moves:
                self._moves[key] = _Moved(ends[key][0], self._rows)
        for key, moved in self._moves.items():
            moved.add(ends[key][1] if key in ends else moved.start, rows)
        self._rows += rows

    def move(self) -> None:
        """After all passes. Callable rules come last, as they may look at other buffers, in the order they came in."""

        def place(moved: _Moved) -> int:
            return list(rules_of(moved.buffer.module)).index(moved.buffer.name) if callable(moved.rule) else -1

        if self._moves:
            with torch.no_grad():
                for moved in sorted(self._moves.values(), key=place):
                    moved.move()
        self.open()


class WindowBuffers(_Moves):
    """The buffers of a window's micro-batches: each finds them as the window did, and they move once, at its end."""

    @torch.no_grad()
    def micro_batch(self, moved: Sequence[BufferSnapshot], rows: int) -> None:
        """A micro-batch of so many rows is in, which moved these. Has the next one find what this one has found."""
        ends: dict[Hashable, Any] = {(id(b.owner), b.name): (b, b.owner.get(b.name)) for b in moved}
        self.add(ends, rows, ends)
        for key in ends:  # all ends are known: some may share memory
            self._moves[key].buffer.reset()


def _clones(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


class LentBuffers(_Moves):
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
        self._dicts = BufferDicts({key: m for key, m in owners.items() if not isinstance(m, _BatchNorm)})

    def lent(self, rows: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Around one pass: a first pass over so many rows, or, without rows, a repetition that moves nothing."""
        return self._lent(rows) if self._found or self._dicts.any else _NO_CONTEXT

    @contextlib.contextmanager
    def _lent(self, rows: int | None) -> Iterator[None]:
        wanted = [key for key in self._found if rows is None or key not in self._excluded]
        copies = self._copied({key: self._starts[key] for key in wanted})
        versions = {key: lent._version for key, lent in copies.items() if not lent.is_inference()}
        places = [(holder, name, buffer) for holder, name, buffer in self._places if id(buffer) in copies]
        ends: dict[Hashable, tuple[BufferSnapshot, Tensor | None]] = {}
        made: dict[Hashable, tuple[BufferSnapshot, Tensor | None]] = {}
        try:
            for holder, name, buffer in places:
                holder[name] = copies[id(buffer)]
            yield
        finally:
            for found in self._dicts.made():
                made[id(found.owner), found.name] = found, found.owner[found.name]
                found.reset()
            for holder, name, buffer in places:
                ends[id(buffer)] = self._found[id(buffer)], holder.get(name)
                holder[name] = buffer
        if rows is not None:
            edited = [key for key, lent in copies.items() if self._edited(*ends[key], lent, versions.get(key))]
            self.add({**ends, **made}, rows, [*edited, *made])

    def _edited(self, found: BufferSnapshot, value: Tensor | None, lent: Tensor, version: int | None) -> bool:
        # PyTorch's normalisation kernels don't count their moves as in-place edits.
        if value is not lent or found.unversioned or version is None or value._version != version:
            return True
        # What moves through `.data` or NumPy shows in its value alone; elsewhere a look would wait for the device.
        return lent.is_cpu and lent.nbytes <= LOOKED_AT and not torch.equal(lent, found.copy)  # type: ignore[arg-type]  # there is


Key = tuple[int, str]
Buffers = Mapping[Key, tuple[dict[str, Any], Mapping[str, BufferSnapshot]]]


@torch.no_grad()
def take_over(
    buffers: Buffers,
    device: torch.device,
    broadcast: Callable[[Any], Any],
    *,
    gives: bool,
    takes: bool,
) -> None:
    """Have the ranks agree after an update on the buffers on which they agreed before, where some have run nothing.

    Those on which they didn't are each rank's own, as statistics of its rows are: without rows they stay.
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
