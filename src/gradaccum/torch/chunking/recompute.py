"""What a forward pass depends on besides its inputs, kept so that it can be run again exactly.

Random numbers (PyTorch's on every device concerned, Python's, NumPy's), autocast, and the buffers the module moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.random_state import RandomState, all_generators, kept

__all__ = ["Buffers", "Surroundings", "accelerators", "stand_ins", "swapped"]


_NOTHING = contextlib.nullcontext()


def accelerators(tensors: Iterable[Any]) -> list[torch.device]:
    """The devices of these tensors, each once, without the CPU.

    Example:
        >>> accelerators([torch.zeros(2), "no tensor"])
        []
    """
    found = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


class Surroundings:
    """The random state and the autocast settings of this moment.

    Args:
        devices: Accelerators whose random state counts; the CPU's, Python's and NumPy's always do.

    Example:
        >>> here = Surroundings([])
        >>> drawn = torch.rand(3)
        >>> with here.replayed():
        ...     again = torch.rand(3)
        >>> torch.equal(drawn, again)
        True
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        devices = list(devices)
        self.random = RandomState(all_generators(devices))
        types = sorted({"cpu", *(device.type for device in devices)})
        self.autocast = [
            (type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_))
            for type_ in types
            if torch.amp.is_autocast_available(type_)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def leave(self, *, all_moved: bool = False) -> Surroundings:
        """What is to be replayed has run once: keep the states of the generators that it has moved, only.

        Args:
            all_moved: It has moved all of them, or may have, without a look.

        Returns:
            The surroundings of whatever runs next.
        """
        following = object.__new__(Surroundings)
        following.random, following.autocast = RandomState(self.random.states), self.autocast
        following.autocast_cache = self.autocast_cache
        if not all_moved:
            self.random = self.random.only(self.random.moved(following.random))
        return following

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """These surroundings inside; outside, everything as it was, as if nothing had been drawn."""
        with kept(self.random.states), self.again():
            yield

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """The same, but for random numbers: from here on they are what they were here."""
        self.random.put_back()
        casts = [cast for cast in self.autocast if cast[1] or torch.is_autocast_enabled(cast[0])]
        if not casts:
            return _NOTHING
        stack = contextlib.ExitStack()
        for type_, enabled, dtype in casts:
            stack.enter_context(torch.autocast(type_, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
        return stack


@contextlib.contextmanager
def swapped(module: nn.Module, replacements: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Other tensors in place of the module's parameters and buffers, wherever it holds them.

    Args:
        module: What to look through, submodules included.
        replacements: New tensors, by `id` of the parameter or buffer they replace.

    Yields:
        A dict that, after the block, holds what the module had in those places at its end, by the same ids: another
        tensor than the replacement where the module assigned one.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    left: dict[int, Tensor] = {}
    try:
        if replacements:
            for submodule in module.modules():
                holders: list[dict[str, Any]] = [submodule._parameters, submodule._buffers]
                for held in holders:
                    for name, tensor in held.items():
                        if tensor is not None and id(tensor) in replacements:
                            places.append((held, name, tensor))
            for held, name, tensor in places:
                held[name] = replacements[id(tensor)]
        yield left
    finally:
        for held, name, tensor in places:
            now = held.get(name)
            left[id(tensor)] = tensor if now is None else now
            held[name] = tensor


def stand_ins(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Leaves that share the parameters' values and have a `.grad` of their own, by `id` of the parameter.

    What is summed in them reaches no hook of the parameters. Half-precision gradients are summed in float32.
    """
    made: dict[int, Tensor] = {}
    for parameter in parameters:
        leaf = nn.Parameter(parameter.detach())
        leaf.__dict__.update(parameter.__dict__)
        if leaf.dtype in (torch.bfloat16, torch.float16):
            leaf.grad_dtype = torch.float32
        made[id(parameter)] = leaf
    return made


class Buffers:
    """A module's buffers: lent to one pass after the other as they were at first, and moved once.

    They move to where the passes took them on average over rows. That is exact for what doesn't depend on the rows
    (counters, power iterations) and for moving averages of means over rows.

    Args:
        module: Whose buffers are meant.
        owned: Those, by id, that passes with rows move themselves.

    Example:
        >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        >>> buffers = Buffers(layer)
        >>> for rows in torch.randn(6, 2).split(3):
        ...     with buffers.lent(rows=3):
        ...         y = layer(rows)
        >>> buffers.move()            # one power iteration, not two
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module, owned: Collection[int] = ()) -> None:
        self.module = module
        self.originals = {id(buffer): buffer for buffer in module.buffers()}
        self.before = {key: buffer.detach().clone() for key, buffer in self.originals.items()}
        self.owned = owned
        # PyTorch's normalisation kernels don't count their moves as in-place edits, so these are told by their names.
        self.uncounted = {
            id(buffer) for name, buffer in module.named_buffers() if name.rpartition(".")[2].startswith("running_")
        }
        self.moved: dict[int, Tensor] = {}
        self.rows = 0

    def lent(self, rows: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """For one pass: a first pass over so many rows, or, without rows, a repetition that moves nothing."""
        return self._lent(rows) if self.before else _NOTHING

    @contextlib.contextmanager
    def _lent(self, rows: int | None) -> Iterator[None]:
        copies = {key: buffer.clone() for key, buffer in self.before.items() if rows is None or key not in self.owned}
        versions = {key: copy._version for key, copy in copies.items() if not copy.is_inference()}
        with swapped(self.module, copies) as left:
            yield
        if rows is not None:
            self._note(
                rows, left, {key for key, value in left.items() if self._edited(value, copies[key], versions, key)}
            )

    def _edited(self, value: Tensor, copy: Tensor, versions: dict[int, int], key: int) -> bool:
        return value is not copy or key in self.uncounted or key not in versions or value._version != versions[key]

    @torch.no_grad()
    def _note(self, rows: int, left: dict[int, Tensor], edited: Collection[int]) -> None:
        self.rows += rows
        for key, value in left.items():
            if key not in edited and key not in self.moved:
                continue
            mean = self.moved.get(key, self.before[key])
            if rows == self.rows or not value.is_floating_point():
                self.moved[key] = value.detach().clone()
            else:  # where nothing differs nothing changes, so that infinities and constants stay what they are
                step = (value - mean) * (rows / self.rows)
                self.moved[key] = torch.where(value == mean, mean, mean + step)

    @torch.no_grad()
    def move(self) -> None:
        """After all first passes."""
        for key, value in self.moved.items():
            original = self.originals[key]
            (original.data if key in self.uncounted else original).copy_(value)
