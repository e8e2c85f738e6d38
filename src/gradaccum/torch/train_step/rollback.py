"""What the optimizers' step changes, remembered so that a step that fails halfway can be taken back."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory, local_part

__all__ = ["Rollback"]

SMALL = 1 << 20
"""Bytes whose copy takes no time beside an update."""


class Rollback:
    """Puts parameters, optimizer state and parameter groups back, bit for bit.

    What is written in place is lost without a copy, and a copy of everything before every update costs what
    accumulation is there to save. So there is one where it is next to free, and where a step may run out of memory:

    - parameters and state of at most 1 MiB together: always;
    - larger ones: on the host, at the first update, where optimizers make their state; where less memory is free than
      at any update that went well; and with `always`.

    Elsewhere nothing can be said: the kernels of `torch._foreach_*` and `fused=True` don't raise the tensors' versions.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], gauge: MemoryMeter, *, always: bool = False
    ) -> None:
        self._optimizers, self._gauge, self.always = optimizers, gauge, always
        self._first, self._large = True, False
        self._held: list[_Held] = []
        self._copies: _Copies | None = None
        self._free = self._enough = math.inf
        # On a CPU, the system ends a process that takes too much, and a copy would only hasten that.
        self._ask_again = math.inf if gauge.device.type == "cpu" else -math.inf

    def remember(self) -> None:
        """A step begins."""
        risky = self._first or self.always or self._short()
        if self._large and not risky:  # what is large stays so, and needs no counting
            self._copies = None
            return
        tensors = list({id(tensor): tensor for o in self._optimizers for tensor in _tensors(o)}.values())
        self._large = sum([tensor.nbytes for tensor in tensors]) > SMALL
        if self._large and not risky:
            self._copies = None
            return
        self._held = [_Held(optimizer) for optimizer in self._optimizers]
        try:
            if self._copies is None or not self._copies.are_of(tensors):
                self._copies = _Copies(tensors, on_host=self._large)
            self._copies.take()
        except Exception as error:
            self._copies = None  # without, the step may still go well
            if not is_out_of_memory(error):
                raise

    def forget(self) -> None:
        """It went well."""
        if self._first:  # the state has been made, so this is what later steps find
            self._first = False
            if self._ask_again < math.inf:
                self._free = self._free_memory()
        self._enough = min(self._enough, self._free)
        if self._copies is not None and self._copies.on_host:
            self._copies = None

    def restore(self) -> bool:
        """It failed. Returns whether everything is as it was."""
        copies, self._copies = self._copies, None
        if copies is None:
            return False
        for held in self._held:
            held.restore()
        copies.put_back()
        return True

    def _short(self) -> bool:
        """Whether less memory is free than at any update that went well; asked in 1 % of the time, at most."""
        if self._ask_again == math.inf or (now := time.perf_counter()) < self._ask_again:
            return False
        self._free = self._free_memory()
        self._ask_again = now + 100 * (time.perf_counter() - now)
        return self._free < self._enough - SMALL

    def _free_memory(self) -> float:
        limit = self._gauge.limit()
        return math.inf if limit is None else limit - self._gauge.live()


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that a step may write to."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        found += group["params"]
        found += [value for value in group.values() if isinstance(value, Tensor)]
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else [state]:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (dict, list, tuple)):
                found += [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]
    return found


class _Held:
    """What an optimizer refers to, apart from the values of tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = [(key, state, _copied(state)) for key, state in optimizer.state.items()]
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._optimizer.state.clear()
        for key, state, copy in self._state:
            if isinstance(state, dict):  # the same one: schedulers and hooks may hold it
                state.clear()
                state.update(copy)
            self._optimizer.state[key] = state if isinstance(state, dict) else copy
        for group, copy in self._groups:
            group.clear()
            group.update(copy)


def _copied(state: Any) -> Any:
    """The same tensors and numbers in containers of their own."""
    if isinstance(state, Tensor):
        return state
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(value) for value in state)
    return state


class _Copies:
    """The values of some tensors."""

    def __init__(self, tensors: list[Tensor], *, on_host: bool) -> None:
        self.on_host = on_host
        self._tensors = tensors
        self._sharded = any([hasattr(tensor, "to_local") for tensor in tensors])
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for tensor in map(local_part, tensors):
            alike[tensor.device, tensor.dtype].append(tensor)
        device = "cpu" if on_host else None
        self._pairs = [(group, [torch.empty_like(t, device=device) for t in group]) for group in alike.values()]

    def are_of(self, tensors: list[Tensor]) -> bool:
        """Whether `take` can be called again for these."""
        return not self._sharded and list(map(id, tensors)) == list(map(id, self._tensors))

    def take(self) -> None:
        with torch.no_grad():
            for originals, copies in self._pairs:
                torch._foreach_copy_(copies, originals)

    @torch.no_grad()
    def put_back(self) -> None:
        for originals, copies in self._pairs:
            torch._foreach_copy_(originals, copies)
