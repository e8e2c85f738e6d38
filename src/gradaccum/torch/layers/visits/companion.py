"""A micro-batch whose blocks run before its own pass comes, and what they have made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.random_state import RandomState, all_generators
from gradaccum.torch.chunking.recompute import Conditions
from gradaccum.torch.chunking.trees import Inputs, tensors_of, with_tensors, without_tensors
from gradaccum.torch.layers.calls import Ready
from gradaccum.torch.layers.offload import Store, Waiting

__all__ = ["Companion", "Key", "Origins", "Run", "alike", "version_of"]

Key = tuple[int, str, int]
"""A block's place, "in" or "out", and the tensor's number there."""


class Run(NamedTuple):
    """A block's first pass on a companion."""

    inputs: Any
    """What it was called with, without tensors."""
    tensors: list[Waiting]
    outputs: Any
    """What it returned, without tensors."""
    results: list[Waiting]
    passes: list[bool]
    """Of each of these, whether it wanted a gradient."""
    given: list[int]
    """Of each, which of the tensors among the inputs it is; -1: none."""
    setting: Any
    conditions: Conditions

    def ready(self, inputs: Inputs) -> Ready:
        """For a call with these inputs: an output that is an input is so again, with the graph that leads to it."""
        given, results = tensors_of(inputs), []
        for waiting, passes, place in zip(self.results, self.passes, self.given, strict=True):
            results.append(given[place] if place >= 0 else waiting.get().detach().requires_grad_(passes))
        return Ready(with_tensors(self.outputs, results), self.conditions)

    def share(self, outputs: Any, store: Store) -> None:
        """These are what has been made, and need not wait a second time."""
        for tensor, waiting in zip(tensors_of(outputs), self.results, strict=True):
            store.share(tensor, waiting)


class Origins:
    """Where the tensors of one forward pass come from, as far as blocks have seen them."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> Key | None:
        """None also of what has been edited since."""
        key, version = self._known.get(tensor, (None, -1))
        return key if version == version_of(tensor) else None

    def note(self, place: int, what: str, tensors: Iterable[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            if what == "out" or self.of(tensor) is None:
                self._known[tensor] = (place, what, index), version_of(tensor)


class Companion:
    """A micro-batch whose own pass comes later.

    Its code around the blocks runs in stretches, each between two blocks, maybe several times: each time a stretch
    draws what it drew at first.
    """

    def __init__(self, retake: Callable[[], Batch], device: torch.device) -> None:
        self.retake = retake
        self.runs: list[Run] = []
        self.goes_on = True
        self.alike = True
        """Whether its calls have had the first one's structure so far, so that tensors have the same numbers in it."""
        self.origins = Origins()
        self._generators = all_generators([device])
        self._starts: list[RandomState] = []
        self._elsewhere: RandomState | None = None

    def begin(self) -> None:
        """A pass of its own begins, maybe of many."""
        self.origins = Origins()
        self._enter(0)

    def _enter(self, stretch: int) -> None:
        if stretch < len(self._starts):
            if self._elsewhere is None:
                self._elsewhere = RandomState(self._generators)
            self._starts[stretch].put_back()
            return
        self.leave()
        self._starts.append(RandomState(self._generators))

    def leave(self) -> None:
        """Go on with the random numbers that nobody has drawn yet."""
        if self._elsewhere is not None:
            self._elsewhere.put_back()
            self._elsewhere = None

    def waiting(self, key: Key) -> Waiting:
        place, what, index = key
        run = self.runs[place]
        return (run.tensors if what == "in" else run.results)[index]

    def run_of(self, place: int, inputs: Inputs, setting: Any, store: Store) -> Run | None:
        """What the block at this place made of these inputs; None if it has run on other ones."""
        run = self.runs[place] if place < len(self.runs) else None
        tensors = tensors_of(inputs)
        if run is None or setting != run.setting or not alike(without_tensors(inputs), run.inputs):
            return None
        if any(waiting.edited for waiting in (*run.tensors, *run.results)):
            return None
        for tensor, waiting in zip(tensors, run.tensors, strict=True):
            key = self.origins.of(tensor)
            if (key is None or self.waiting(key) is not waiting) and not _equal(tensor, waiting.get()):
                return None
        for tensor, waiting in zip(tensors, run.tensors, strict=True):
            store.share(tensor, waiting)
        self.origins.note(place, "in", tensors)
        return run

    def passed(self, place: int, outputs: Any) -> None:
        """Its pass has gone through the block, by what the block has made before."""
        self.origins.note(place, "out", tensors_of(outputs))
        self._enter(place + 1)


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def alike(one: Any, other: Any) -> bool:
    """Whether two trees without tensors are the same."""
    plain, mine, theirs = (int, float, str, torch.device), list(leaves(one)), list(leaves(other))
    return len(mine) == len(theirs) and all(
        path == where and (a is b or (type(a) is type(b) and isinstance(a, plain) and repr(a) == repr(b)))  # 0.0, -0.0
        for (path, a), (where, b) in zip(mine, theirs, strict=True)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and one.layout is other.layout is torch.strided and torch.equal(one, other)
