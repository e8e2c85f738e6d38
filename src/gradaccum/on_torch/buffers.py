"""The buffers of modules at some moment: which there are, copies of those that move, and how to put them back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.on_torch.random_state import RandomState, torch_generators

__all__ = [
    "SMALL",
    "Held",
    "HeldBuffer",
    "Holders",
    "Moving",
    "Place",
    "as_found",
    "evaluated",
    "hold",
    "put",
    "same",
    "set_to",
]

logger = logging.getLogger("gradaccum")

SMALL = 1 << 20
"""Bytes of a buffer whose copy takes no time beside an update."""

SAMPLED = 1 << 10
"""Numbers of a larger one that are looked at."""

Place = tuple[dict[str, Any], str]
"""The dict that holds a buffer, and its name there."""


class Moving(NamedTuple):
    """A buffer that a pass has moved."""

    holder: dict[str, Any]
    name: str
    tensor: Tensor | None
    """What was there; None where the pass has made it."""
    start: Tensor | None
    """A copy of that."""
    named: bool = True
    """Whether the name was there, if only for None."""


class HeldBuffer(NamedTuple):
    """One buffer, with a copy if it may move."""

    owner: dict[str, Any]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    sample: Tensor | None = None
    """Some of its numbers, where a copy would be too large."""

    @property
    def place(self) -> tuple[int, str]:
        """Names it among all buffers."""
        return id(self.owner), self.name

    @property
    def moved(self) -> bool:
        """Whether it has been edited, or another one is in its place."""
        # PyTorch's normalisation kernels don't raise the version of the statistics they move.
        uncounted = self.name.startswith("running_")
        return self.owner.get(self.name) is not self.tensor or self.tensor._version != self.version or uncounted

    def differs(self) -> bool:
        """Whether its value is another one than when it was copied, or sampled."""
        if self.owner.get(self.name) is not self.tensor:
            return True
        if self.sample is not None:
            return not same(_sample(self.tensor), self.sample)
        return self.copy is not None and not same(self.tensor, self.copy)

    def put_back(self, copy: Tensor) -> None:
        """Have the same tensor there, with this value."""
        self.owner[self.name] = self.tensor
        set_to(self.tensor, copy)


class Held(NamedTuple):
    """Random number generators and buffers as they were at some moment."""

    random: RandomState | None
    buffers: list[HeldBuffer]

    @torch.no_grad()
    def put_back(self, before: Held | None = None) -> None:
        """Restore everything.

        Args:
            before: An earlier state, since which the buffers without a copy here stood still.
        """
        if self.random is not None:
            self.random.put_back()
        earlier = {} if before is None else {buffer.place: buffer.copy for buffer in before.buffers}
        lost = []
        for buffer in self.buffers:
            if buffer.copy is not None:
                if buffer.moved or buffer.differs():
                    buffer.put_back(buffer.copy)
            elif buffer.moved or buffer.differs():
                copy = earlier.get(buffer.place)
                if copy is not None:
                    buffer.put_back(copy)
                    continue
                buffer.owner[buffer.name] = buffer.tensor  # another one may have been put in its place
                if buffer.tensor._version != buffer.version or buffer.differs():
                    lost.append(buffer.name)
        if lost:
            logger.warning(
                "These buffers moved for the first time in passes that failed, and are too large to be copied for that "
                "case, so they stay as they are now: %s.",
                ", ".join(map(repr, lost)),
            )

    def learn(self, still: set[tuple[int, str]]) -> None:
        """Put into `still` which buffers have not moved since."""
        for buffer in self.buffers:
            if buffer.moved:
                still.discard(buffer.place)
            else:
                still.add(buffer.place)


class Holders:
    """The dicts that hold modules' buffers: finds what a forward pass makes, and takes it away again.

    Args:
        dicts: Of every module, those without buffers included.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> holders = Holders([layer._buffers])
        >>> layer.register_buffer("mean", torch.ones(2))
        >>> [(found.name, found.start) for found in holders.made()]
        [('mean', None)]
        >>> holders.unmake()
        >>> list(layer._buffers)
        []
    """

    def __init__(self, dicts: Sequence[dict[str, Any]] = ()) -> None:
        self._dicts = dicts
        self._names = {id(names): frozenset(names) for names in dicts if names}
        self._count = sum(map(len, dicts))
        self._empty = [(names, name) for names in dicts if names for name, buffer in names.items() if buffer is None]

    @property
    def any(self) -> bool:
        """Whether there are any modules to look at."""
        return bool(self._dicts)

    def made(self) -> list[Moving]:
        """What is there now, and was not."""
        found = [Moving(names, name, None, None) for names, name in self._empty if names.get(name) is not None]
        if sum(map(len, self._dicts)) == self._count:
            return found
        for names in self._dicts:
            new = names.keys() - self._names.get(id(names), frozenset())
            found += [Moving(names, name, None, None, False) for name in names if name in new]
        return found

    def unmake(self) -> None:
        """Take it away, so that the next pass makes it again."""
        for holder, name, _, _, named in self.made():
            if named:
                holder[name] = None
            else:
                del holder[name]


def hold(places: Sequence[Place], still: Collection[tuple[int, str]] = (), smallest: int = 0) -> list[HeldBuffer]:
    """The buffers at these places, with copies of those that move or are not larger than `smallest` bytes."""
    buffers = []
    for owner, name in places:
        tensor = owner.get(name)
        if tensor is not None:
            copied = (id(owner), name) not in still or tensor.nbytes <= smallest
            sample = None if copied or not smallest else _sample(tensor)
            buffers.append(HeldBuffer(owner, name, tensor, tensor._version, tensor.clone() if copied else None, sample))
    return buffers


def set_to(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor this value, and the size that goes with it."""
    if tensor.shape != value.shape:
        tensor.data = value.clone()  # another size may not fit into its memory
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


def _sample(tensor: Tensor) -> Tensor | None:
    """Some numbers from all over a large tensor; None where that takes a copy of all."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // SAMPLED)].clone()


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
def as_found(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Leave the buffers of these modules, and PyTorch's random numbers on a device, as they are.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with as_found(norm.modules(), torch.device("cpu")):
        ...     y = norm(torch.randn(3, 2))
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """
    modules = list(modules)
    state = Held(
        RandomState(torch_generators([device])), hold([(m._buffers, name) for m in modules for name in m._buffers])
    )
    holders = Holders([module._buffers for module in modules])
    try:
        yield
    finally:
        holders.unmake()
        state.put_back()
