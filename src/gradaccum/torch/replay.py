"""What a forward pass depends on besides its inputs, kept so that it can be run again exactly.

Random numbers (PyTorch's on every device concerned, Python's, NumPy's), autocast, and the buffers the module moves.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Surroundings", "accelerators", "stand_ins", "swapped"]


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
        self.devices = list(devices)
        self.random = _random_states(self.devices)
        types = sorted({"cpu", *(device.type for device in self.devices)})
        self.autocast = [
            (type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_))
            for type_ in types
            if torch.amp.is_autocast_available(type_)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """These surroundings inside; outside, everything as it was, as if nothing had been drawn."""
        outside = _random_states(self.devices)
        with contextlib.ExitStack() as stack:
            stack.callback(_set_random_states, outside)
            _set_random_states(self.random)
            for type_, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(type_, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                )
            yield


def _random_states(devices: list[torch.device]) -> dict[Any, Any]:
    states: dict[Any, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for device in devices:
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_states(states: dict[Any, Any]) -> None:
    for source, state in states.items():
        if source == "cpu":
            torch.set_rng_state(state)
        elif source == "python":
            random.setstate(state)
        elif source == "numpy":
            sys.modules["numpy"].random.set_state(state)
        else:
            torch.get_device_module(source).set_rng_state(state, source)


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
