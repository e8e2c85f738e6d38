"""Random number generators, and what it takes to have them draw the same numbers again.

A generator is named "cpu" (PyTorch's there), "python", "numpy", or by the `torch.device` of an accelerator; or it is
an object of the user's: a `torch.Generator`, `random.Random`, `numpy.random.Generator` or `numpy.random.RandomState`.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def torch_generators(devices: Iterable[torch.device] = ()) -> list[Any]:
    """PyTorch's generators, on the CPU and on these devices."""
    return ["cpu", *(device for device in devices if device.type not in ("cpu", "meta"))]


def all_generators(devices: Iterable[torch.device] = ()) -> list[Any]:
    """PyTorch's, Python's, and NumPy's where it is loaded."""
    return [*torch_generators(devices), "python", *(["numpy"] if "numpy" in sys.modules else [])]


def every_device() -> list[torch.device]:
    """The CUDA devices of this process, if it uses any."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def is_generator(value: Any) -> bool:
    """Whether this is an object that draws random numbers, of PyTorch's, Python's or NumPy's."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


class RandomState:
    """The states of some generators at this moment."""

    looks = True
    """Whether there is something to look at: fake tensors draw nothing, and a fake state says nothing."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self.states = {one: _access(one)[0]() for one in generators} if RandomState.looks else {}

    def put_back(self) -> None:
        """Have the generators draw what they drew from here on."""
        for generator, state in self.states.items():
            _access(generator)[1](state)

    def only(self, generators: Iterable[Any]) -> RandomState:
        """The states of these generators at that moment."""
        new = RandomState(())
        new.states = {generator: self.states[generator] for generator in generators}
        return new

    def moved(self, now: RandomState | None = None) -> list[Any]:
        """The generators that have drawn something since."""
        now = RandomState(self.states) if now is None else now
        return [generator for generator, state in self.states.items() if not _same(state, now.states[generator])]


class Conditions:
    """The random state and the autocast settings that a forward pass starts from."""

    def __init__(self, generators: Iterable[Any], devices: Iterable[torch.device] = ()) -> None:
        self.random = RandomState(generators)
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
            if torch.amp.is_autocast_available(kind)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def advance(self) -> Conditions:
        """The forward pass has run: keep the states of the generators that it has moved, only. Returns those now."""
        following = copy.copy(self)
        following.random = RandomState(self.random.states)
        self.random = self.random.only(self.random.moved(following.random))
        return following

    def restored(self) -> contextlib.AbstractContextManager[Any]:
        """Set the generators to these states, and enter these autocast settings."""
        self.random.put_back()
        casts = [cast for cast in self.autocast if cast[1] or torch.is_autocast_enabled(cast[0])]
        if not casts:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind, enabled, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
        return stack


@contextlib.contextmanager
def nothing_drawn() -> Iterator[None]:
    """Around what computes with fake tensors: generators are neither looked at nor put back."""
    held, RandomState.looks = RandomState.looks, False
    try:
        yield
    finally:
        RandomState.looks = held


_CPU = torch.default_generator.get_state, torch.set_rng_state


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What gets and what sets a generator's state."""
    if generator == "cpu":
        return _CPU
    if generator == "python" or isinstance(generator, random.Random):
        python = random if generator == "python" else generator
        return python.getstate, python.setstate
    if isinstance(generator, torch.device):
        module = torch.get_device_module(generator)
        return lambda: module.get_rng_state(generator), lambda state: module.set_rng_state(state, generator)
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    other = sys.modules["numpy"].random if generator == "numpy" else generator
    return other.get_state, other.set_state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):  # NumPy's, and arrays inside of them
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple) and not isinstance(one[1], tuple):
        return all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "shape") else bool(one == other)


@contextlib.contextmanager
def kept(generators: Iterable[Any]) -> Iterator[None]:
    """Leave these generators as they were found."""
    state = RandomState(generators)
    try:
        yield
    finally:
        state.put_back()


def seed(number: int) -> None:
    """Seed PyTorch's (on the CPU and on the CUDA devices in use), Python's and NumPy's global generators."""
    # torch.manual_seed writes down a stack trace for each kind of device that is not in use, which takes milliseconds.
    torch.default_generator.manual_seed(number)
    for device in every_device():
        torch.cuda.default_generators[device.index].manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
