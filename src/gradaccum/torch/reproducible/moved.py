"""Buffers that micro-batches move: each finds them as the window did, and all move them in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.state import BufferSnapshot, WindowState
from gradaccum.torch.batch_norm import BatchNormPolicy, Pool, batch_norms, move_running_statistics
from gradaccum.torch.buffers import Ends, WindowBuffers

Place = tuple[int, str]
"""A module: the number of the root that it belongs to, and its path there."""


class Moves:
    """What one micro-batch has moved, to be sent to other ranks: in host memory, by place."""

    def __init__(self) -> None:
        self.ends: dict[tuple[Place, str], tuple[Tensor | None, bool]] = {}
        """Of each buffer that isn't BatchNorm's: where it was moved to, and whether its name was there."""
        self.statistics: dict[Place, list[tuple[float, Tensor, Tensor]]] = {}
        """Of each call of a BatchNorm layer: count, mean and sum of squared deviations."""

    def __bool__(self) -> bool:
        return bool(self.ends or self.statistics)


class OrderedBatchNorm(BatchNormPolicy):
    """Collects the statistics of each micro-batch, and moves nothing: `MovedBuffers` does."""

    def __init__(self, policy: BatchNormPolicy) -> None:
        super().__init__(policy.choice, policy.module, remedy=policy.remedy)
        self.merges, self.pooled = policy.pooled, policy.choice != "frozen"
        self.micro: dict[Any, list[Pool]] = {}

    @contextlib.contextmanager
    def _collected(self) -> Iterator[None]:
        self._micro, self._collecting = {}, True
        try:
            yield
        finally:
            self._collecting = False
            self.micro, self._micro = self._micro, {}


class MovedBuffers:
    """The moves of a window's micro-batches, on one rank, and then on all of them."""

    def __init__(self, roots: Sequence[nn.Module], state: WindowState, norm: OrderedBatchNorm | None) -> None:
        self._modules = {(n, path): part for n, root in enumerate(roots) for path, part in root.named_modules()}
        self._places = {id(part._buffers): place for place, part in reversed(self._modules.items())}
        self._state, self._norm = state, norm
        self.moves: list[Moves] = []

    @torch.no_grad()
    def micro_batch(self) -> None:
        """A micro-batch is in. Has the next one find what this one has found."""
        found, moved = Moves(), self._state.moved()
        for buffer in moved:
            end = buffer.owner.get(buffer.name)
            key = self._places[id(buffer.owner)], buffer.name
            found.ends[key] = None if end is None else end.detach().to("cpu", copy=True), buffer.name in buffer.owner
        for buffer in moved:  # all ends are known: some may share memory
            buffer.reset()
        for layer, pools in self._norm.micro.items() if self._norm is not None else ():
            place = self._places[id(layer._buffers)]
            found.statistics[place] = [(pool.count, pool.mean.cpu(), pool.deviations.cpu()) for pool in pools]
        self.moves.append(found)

    @torch.no_grad()
    def move(self, everything: Sequence[Moves], sizes: Sequence[int]) -> None:
        """Move the buffers as all ranks' micro-batches did, of these sizes in their order."""
        buffers, held = WindowBuffers(), self._state.buffers()
        known: dict[tuple[Place, str], BufferSnapshot] = {}
        for moves, rows in zip(everything, sizes, strict=True):
            ends: Ends = {}
            for key, (end, named) in moves.ends.items():
                (place, name), module = key, self._modules[key[0]]
                if key not in known:
                    snapshot = held[place][1].get(name)
                    known[key] = snapshot or BufferSnapshot(module._buffers, name, module, name in module._buffers)
                there = known[key].tensor
                device = self._state.device if there is None else there.device
                ends[key] = known[key], None if end is None else end.to(device), named
            buffers.add(ends, rows, ends)
        buffers.move()
        self._move_statistics(everything)

    def _move_statistics(self, everything: Sequence[Moves]) -> None:
        merged: dict[Place, list[Pool]] = {}
        for moves in everything:
            for place, calls in moves.statistics.items():
                layer = self._modules[place]
                device = next((b.device for b in layer._buffers.values() if b is not None), torch.device("cpu"))
                pools = [Pool(count, mean.to(device), deviations.to(device)) for count, mean, deviations in calls]
                if self._norm is not None and self._norm.merges:
                    before = merged.get(place, [])
                    both = [one.merged(other) for one, other in zip(before, pools)]
                    merged[place] = [*both, *before[len(pools) :], *pools[len(before) :]]
                else:
                    _move(layer, pools)
        for place, pools in merged.items():
            _move(self._modules[place], pools)


def _move(layer: nn.Module, pools: Sequence[Pool]) -> None:
    assert isinstance(layer, _BatchNorm)
    for pool in pools:
        move_running_statistics(layer, pool.mean, pool.unbiased_variance)


def ordered(policy: BatchNormPolicy) -> OrderedBatchNorm | None:
    """What takes the place of a policy where there are BatchNorm layers that move statistics."""
    if policy.choice == "frozen" or not batch_norms(policy.module):
        return None
    return OrderedBatchNorm(policy)
