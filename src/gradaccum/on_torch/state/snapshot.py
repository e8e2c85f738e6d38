"""Buffers of modules and random number generators as they were at a moment, and how they are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.random_state import RandomState, torch_generators

SMALL = 1 << 20
"""Bytes of a buffer whose copy takes no time beside an update."""


class BufferSnapshot:
    """One buffer: the dict that holds it, what it was when the window began, and whether windows move it."""

    def __init__(self, owner: dict[str, Any], name: str, module: nn.Module | None = None, named: bool = True) -> None:
        self.owner, self.name, self.module = owner, name, module
        self.named = named
        """Whether the name was there, if only for None."""
        self.tensor: Tensor | None = None
        """What was there; None where a pass has made it."""
        self.copy: Tensor | None = None
        """Its value; None where a copy would be too large."""
        self.version = 0
        self.moves, self.met = True, False
        """Whether windows move it, as far as is known, and whether this one has."""
        # PyTorch's normalisation kernels don't raise the version of the statistics they move.
        self.unversioned = name.startswith("running_")

    def take(self, *, whole: bool = False) -> bool:
        """Remember it as it is now. Returns whether its value is still to be copied into `copy`."""
        tensor: Tensor | None = self.owner.get(self.name)
        wanted = tensor is not None and (whole or self.moves or tensor.nbytes <= SMALL)
        if tensor is not self.tensor or not wanted:
            self.copy = None
        self.met, self.tensor, self.version = False, tensor, 0 if tensor is None else tensor._version
        if tensor is None:  # emptied or deleted since: passes may make it anew
            self.named = self.name in self.owner
        if tensor is None or not wanted:
            return False
        if self.copy is not None and type(tensor) is Tensor and self.copy.shape == tensor.shape:
            return True
        self.copy = tensor.detach().clone()
        return False

    @property
    def moved(self) -> bool:
        """Whether it has been edited, or made, or another one is in its place."""
        if self.tensor is None:
            return self.owner.get(self.name) is not None
        replaced = self.owner.get(self.name) is not self.tensor
        return self.unversioned or replaced or bool(self.tensor._version != self.version)

    def differs(self) -> bool:
        """Whether its value is another one, as what moves through `.data` shows in that alone."""
        return self.moved or (self.copy is not None and not same(self.tensor, self.copy))

    def put_back(self) -> bool:
        """Have the same tensor there, with the value that it had. Returns whether that is so."""
        if self.tensor is None:
            if self.moved:
                self.reset()
            return True
        replaced, edited = self.owner.get(self.name) is not self.tensor, self.differs()
        self.owner[self.name] = self.tensor
        if edited and self.copy is not None:
            self.reset()
        self.moves |= edited
        # Another one may have been put in its place, which is gone now.
        return not edited or self.copy is not None or (replaced and self.tensor._version == self.version)

    def reset(self) -> None:
        """Have the next micro-batch find what this one has found, or nothing where this one has made it."""
        if self.tensor is not None and self.copy is not None:
            self.owner[self.name] = self.tensor
            set_to(self.tensor, self.copy)
            self.version = self.tensor._version
        elif self.named:
            self.owner[self.name] = None
        else:
            del self.owner[self.name]


class Snapshot:
    """Buffers and generators as they were at a moment, and which names of buffers there were.

    `modules`: those in which passes may make buffers, each with a dict of its own.
    """

    def __init__(
        self, buffers: Sequence[BufferSnapshot] = (), modules: Iterable[nn.Module] = (), generators: Iterable[Any] = ()
    ) -> None:
        self.buffers, self.random = buffers, RandomState(generators)
        self.there = [(module, frozenset(module._buffers)) for module in modules]
        self._dicts = [module._buffers for module, _ in self.there]
        self._empty = [(m, name) for m, names in self.there if names for name in names if m._buffers[name] is None]
        self._count = sum(map(len, self._dicts))

    @classmethod
    def of(cls, modules: Iterable[nn.Module], generators: Iterable[Any] = ()) -> Snapshot:
        """These modules' own buffers, and these generators, as they are now."""
        owners = {id(module._buffers): module for module in modules}
        buffers = [BufferSnapshot(m._buffers, name, m) for m in owners.values() for name in m._buffers]
        for buffer in buffers:
            buffer.take(whole=True)
        return cls(buffers, owners.values(), generators)

    @property
    def outdated(self) -> bool:
        """Whether there are buffers since that were None or not there, or names are gone."""
        if sum(map(len, self._dicts)) != self._count:
            return True
        return bool(self._empty) and any(m._buffers.get(n) is not None for m, n in self._empty)

    def made(self) -> list[BufferSnapshot]:
        """What passes have made since: buffers that were None, or not there."""
        found = [BufferSnapshot(m._buffers, n, m) for m, n in self._empty if m._buffers.get(n) is not None]
        if sum(map(len, self._dicts)) != self._count:
            new = [(module, name) for module, names in self.there for name in module._buffers if name not in names]
            found += [BufferSnapshot(module._buffers, name, module, named=False) for module, name in new]
        return found

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Make everything what it was. Returns the names of the buffers that nobody has copied."""
        for made in self.made():
            made.reset()
        self.random.put_back()
        return [buffer.name for buffer in self.buffers if not buffer.put_back()]


def set_to(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor this value, and the size that goes with it."""
    expanded = tensor.layout is torch.strided and 0 in tensor.stride()
    if expanded or tensor.shape != value.shape:
        tensor.data = value.clone()  # another size may not fit into its memory, and an expanded one has too little
    else:
        tensor.copy_(value)


def put(holder: dict[str, Any], name: str, tensor: Tensor | None, value: Tensor) -> None:
    """Have a buffer with this value there: this tensor, if it can take it."""
    if tensor is None or (value.dtype, value.layout, value.device) != (tensor.dtype, tensor.layout, tensor.device):
        holder[name] = value
        return
    holder[name] = tensor
    # PyTorch's normalisation kernels don't count their moves as edits of what a graph has saved: told by name.
    set_to(tensor.data if name.startswith("running_") else tensor, value)


def same(one: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN among them."""
    if one is None or one.shape != other.shape:
        return False
    if one.is_floating_point() and one.itemsize == 1:  # float8 has no comparison of its own
        one, other = one.float(), other.float()
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


@contextlib.contextmanager
def evaluated(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Evaluation mode, with gradients; buffers and random numbers are as before afterwards."""
    # bitsandbytes' layers pack their weights for good when they evaluate on a CPU.
    modes = [(m, m.training) for m in modules if not type(m).__module__.startswith("bitsandbytes.")]
    try:
        for module, _ in modes:
            module.training = False
        with as_found(modules, device), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def as_found(modules: Iterable[nn.Module], device: torch.device, generators: Iterable[Any] = ()) -> Iterator[None]:
    """Leave the buffers of these modules, PyTorch's random numbers on a device, and other generators, as they are."""
    snapshot = Snapshot.of(modules, [*torch_generators([device]), *generators])
    try:
        yield
    finally:
        snapshot.put_back()
