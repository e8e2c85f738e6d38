"""Where buffers go that several passes have each moved from the same start, and the buffers of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.state import BufferSnapshot, put, same, set_to
from gradaccum.torch.buffers.rules import Rule, ruled, rules_of

__all__ = ["Move", "Moved", "WindowBuffers", "move_all", "take_over"]


class Moved:
    """One buffer that passes move, or make, each from the same start.

        mean:   start + sum_i n_i (end_i - start) / N        with the rows n_i of pass i, and N = sum_i n_i

    Example:
        >>> moved = Moved(torch.zeros(2))
        >>> moved.add(torch.tensor([1.0, 2.0]), 3)
        >>> moved.add(torch.tensor([5.0, 2.0]), 1)
        >>> moved.end()
        tensor([2., 2.])
    """

    def __init__(self, start: Tensor | None, rule: Rule = "mean", rows: int = 0) -> None:
        self.start, self.rule, self.rows = start, rule, rows
        self._together = _exactly(start)
        self._ends: list[Tensor] = []
        self._dtype: torch.dtype | None = None
        self._moves = False

    @torch.no_grad()
    def add(self, end: Tensor | None, rows: int) -> None:
        """A pass over so many rows led here; None: it has deleted the buffer, or not made it."""
        self.rows += rows
        if end is None:
            self._together = None if self.start is not None else self._together
            return
        if callable(self.rule):
            self._ends.append(end.detach().clone())
            return
        self._dtype = end.dtype
        end, start, so_far = _exactly(end.detach()), _exactly(self.start), self._together
        assert end is not None
        if self.rule == "once":
            self._together = so_far if self._moves else end.clone()
            self._moves = self._moves or start is None or not _alike(end, start) or not torch.equal(end, start)
        elif so_far is None or not _alike(end, so_far):  # no arithmetic leads from one to the other
            self._together = end.clone()
        elif self.rule == "sum" and (start is None or _alike(end, start)):
            self._together = _sum(start, so_far, end)
        elif rows == self.rows:  # the first pass
            self._together = end.clone()
        elif self.rule == "max":
            self._together = torch.maximum(so_far, end)
        elif not (end.is_floating_point() or end.is_complex()):
            self._together = end.clone()
        else:  # where nothing differs nothing changes, so that infinities and constants stay what they are
            self._together = torch.where(end == so_far, so_far, so_far + (end - so_far) * (rows / self.rows))

    @torch.no_grad()
    def end(self, module: nn.Module | None = None, name: str = "") -> Tensor | None:
        """Where all passes lead together; None: there is no such buffer any more."""
        if callable(self.rule):
            return ruled(module, name, self.rule, self.start, self._ends) if self._ends else None
        return self._together if self._together is None or self._dtype is None else self._together.to(self._dtype)


def _sum(start: Tensor | None, so_far: Tensor, end: Tensor) -> Tensor:
    if end.dtype == torch.bool:
        return so_far | end
    return so_far + (end if start is None else end - start)


def _exactly(value: Tensor | None) -> Tensor | None:
    """As it is; float8, which has no arithmetic of its own, as float32."""
    narrow = value is not None and value.is_floating_point() and value.itemsize == 1
    return value.float() if narrow else value  # type: ignore[union-attr]  # there is one


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)


class Move(NamedTuple):
    """A buffer, and where it goes."""

    module: nn.Module | None
    buffer: BufferSnapshot
    moved: Moved


def move_all(moves: Iterable[Move]) -> None:
    """Move buffers once: those with a callable rule last, as it may look at the others, in the order that was given."""
    moves = list(moves)
    for move in moves:
        if not callable(move.moved.rule):
            _move(move)
    callables = [
        (list(rules_of(move.module)).index(move.buffer.name), move) for move in moves if callable(move.moved.rule)
    ]
    for _, move in sorted(callables, key=lambda ranked: ranked[0]):
        _move(move)


@torch.no_grad()
def _move(move: Move) -> None:
    buffer = move.buffer
    end = move.moved.end(move.module, buffer.name)
    if end is not None:
        put(buffer.owner, buffer.name, buffer.tensor, end)
    elif buffer.name in buffer.owner and buffer.tensor is not None:
        del buffer.owner[buffer.name]


class WindowBuffers:
    """The buffers of a window's micro-batches: each finds them as the window did, and they move once, at its end.

    BatchNorm's statistics are left alone: what becomes of them is `batch_norm`'s to say.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.register_buffer("passes", torch.zeros(()))
        >>> window = WindowBuffers([layer])
        >>> for _ in range(3):
        ...     buffer = BufferSnapshot(layer._buffers, "passes")
        ...     _ = buffer.take(whole=True)
        ...     layer.passes += 1
        ...     window.micro_batch([buffer], rows=4)
        >>> window.close()
        >>> layer.passes
        tensor(1.)
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._owners: dict[int, tuple[Any, nn.Module]] = {}
        self.open()

    def open(self) -> None:
        """A window begins."""
        self._moves: dict[tuple[int, str], Move] = {}
        self._rows = 0

    @torch.no_grad()
    def micro_batch(self, moved: Iterable[BufferSnapshot], rows: int) -> None:
        """A micro-batch of so many rows is in. Has the next one find what this one has found."""
        ends = {}
        for buffer in moved:
            module, key = self._owner(buffer.owner), (id(buffer.owner), buffer.name)
            if isinstance(module, _BatchNorm):
                continue
            ends[key] = buffer.owner.get(buffer.name)
            if key not in self._moves:
                rule = rules_of(module).get(buffer.name, "mean")
                self._moves[key] = Move(module, buffer, Moved(buffer.copy, rule, self._rows))
        for key, move in self._moves.items():
            move.moved.add(ends.get(key, move.moved.start), rows)
        for key in ends:  # all ends are known: some may share memory
            buffer = self._moves[key].buffer
            if buffer.tensor is not None and buffer.copy is not None:
                buffer.owner[buffer.name] = buffer.tensor
                set_to(buffer.tensor, buffer.copy)
                buffer.version = buffer.tensor._version
            elif buffer.named:
                buffer.owner[buffer.name] = None
            else:
                del buffer.owner[buffer.name]
        self._rows += rows

    def close(self) -> None:
        """After the last micro-batch."""
        if self._moves:
            move_all(self._moves.values())
        self.open()

    def _owner(self, holder: dict[str, Any]) -> nn.Module | None:
        if self._owners.get(id(holder), (None,))[0] is not holder:
            found = [module for root in self._modules for module in root.modules()]
            self._owners = {id(module._buffers): (module._buffers, module) for module in found}
        return self._owners.get(id(holder), (None, None))[1]


# Ranks.

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
