"""A sharded model whose blocks take turns: gathered once per pass, and reduced once per update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import ShardedGroup
from gradaccum.torch.distributed.fsdp import Shards

__all__ = ["ByBlocks", "ShardedByBlocks"]


class ByBlocks:
    """What the ranks of a model do for the turns of its blocks: nothing, where it isn't sharded."""

    def window(self) -> contextlib.AbstractContextManager[None]:
        """Around the passes of a window."""
        return contextlib.nullcontext()

    def agree(self, passes: int) -> None:
        """So many micro-batches come on this rank: all ranks are told, where they have to know."""

    def forward(self, *, frees: bool = False, tail: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Around all forward passes. `frees`: blocks are sharded then that FSDP2 would keep gathered; those from the
        place `tail` on stay gathered, as they have gradients by then."""
        return contextlib.nullcontext()

    def call(self, place: int) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch's call of the block at this place, in a forward pass."""
        return contextlib.nullcontext()

    def backward(self, place: int, *, used: bool = False) -> contextlib.AbstractContextManager[None]:
        """Around all backward passes of the block at this place; -1: of what stands before the blocks, the last.
        `used`: its gradients are used before all others are there."""
        return contextlib.nullcontext()

    def add_up(self, place: int = -1) -> None:
        """A micro-batch's backward pass is over, of the block at this place or of what stands outside of the blocks."""

    def places(self) -> dict[int, int]:
        """After which block's turn these parameters have their gradients: places by ids, those that are not at hand."""
        return {}


class ShardedByBlocks(ByBlocks):
    """Gathers the parameters of a sharded model for its blocks' turns, and reduces their gradients after these.

    All ranks come to the same collectives in the same order, whatever micro-batches they have, even none:

        gather what stands outside of the blocks, and each block         before the forward passes; or, with
                                                                         sync="micro_batch", a block for each of its
                                                                         calls, as often as on the rank with most
        gather a block, if it isn't; its backward passes; reduce it      for each block, the last one first
        reduce what stands outside                                       at the end

    What is sharded together with something outside of a block, or with another block, counts as outside.
    """

    def __init__(self, ranks: Any, shards: Shards, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        for path, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{path!r} is a SyncBatchNorm, which waits for the other ranks in every pass, and with `blocks` "
                    "each rank of a sharded model runs its own number of passes. Use GroupNorm, or leave out `blocks`."
                )
        self._ranks, self._shards, self._model, self._blocks = ranks, shards, model, [*blocks]
        self._groups: dict[int, list[ShardedGroup]] = {}
        """By the place of the block that they are gathered for; -1 stands for what is outside."""
        self._one_by_one, self._due = shards.always, 0
        """Whether a forward pass gathers one block at a time; how many such passes are to come."""
        self._tail: int | None = None

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """What stands outside of the blocks is gathered."""
        with self._shards.in_turns() as groups:
            self._groups = self._by_place(groups)
            self._gather(-1)
            yield
            for group in self._groups[-1]:  # gathered once more, where backward ran twice
                group.shard()

    def _by_place(self, groups: Sequence[ShardedGroup]) -> dict[int, list[ShardedGroup]]:
        inside = {id(module) for block in self._blocks for module in block.modules()}
        around = [module for module in self._model.modules() if id(module) not in inside]
        outside = [parameter for module in around for parameter in module.parameters(recurse=False)]
        found: dict[int, list[ShardedGroup]] = {place: [] for place in (-1, *range(len(self._blocks)))}
        for group in groups:
            places = [i for i, block in enumerate(self._blocks) if any(map(group.holds, block.parameters()))]
            alone = len(places) == 1 and not any(map(group.holds, outside))
            found[places[0] if alone else -1].append(group)
        return found

    def _gather(self, place: int) -> None:
        for group in self._groups[place]:
            group.gather()
        self._shards.watch(self._groups[place])

    def agree(self, passes: int) -> None:
        if self._one_by_one:
            self._due = self._ranks.most_passes(passes)

    @contextlib.contextmanager
    def forward(self, *, frees: bool = False, tail: int | None = None) -> Iterator[None]:
        """The blocks are gathered, those of the tail at least."""
        places, self._tail = range(len(self._blocks)), tail
        for place in places[tail:] if self._one_by_one else places:
            self._gather(place)
        yield
        for _ in range(self._due):  # other ranks have more micro-batches
            for place in places[:tail]:
                with self.call(place):
                    pass
        for group in [group for place in places[:tail] for group in self._groups[place]]:
            if frees or not group.stays_gathered:
                group.shard()

    @contextlib.contextmanager
    def call(self, place: int) -> Iterator[None]:
        """The block is gathered meanwhile."""
        if not self._one_by_one or place not in range(len(self._blocks))[: self._tail]:
            yield
            return
        self._gather(place)
        yield
        for group in self._groups[place]:
            group.shard()
        self._due -= place == 0

    @contextlib.contextmanager
    def backward(self, place: int, *, used: bool = False) -> Iterator[None]:
        """It is gathered, and reduced at the end."""
        self._gather(-1)
        self._gather(place)
        yield
        for group in self._groups[place]:
            group.reduce()
        if used:
            self._settle(place)
        late = [p for p, groups in self._groups.items() if place < 0 and any(group.pending() for group in groups)]
        if late:
            path = next(name for name, module in self._model.named_modules() if module is self._blocks[late[0]])
            raise WindowError(
                f"The block {path!r} got a gradient after its turn, when those of its weights had been reduced: "
                "something else uses them, which doesn't have them among its parameters. Register them there, or leave "
                "the block out of `blocks`."
            )

    def add_up(self, place: int = -1) -> None:
        """Gradients in a dtype of their own join the sums, of this block and of what stands outside."""
        for group in [group for each in {-1, place} for group in self._groups[each]]:
            if group.sums_apart:
                group.add_up()

    def places(self) -> dict[int, int]:
        """Of all parameters that the optimizer knows, which are not in the modules while these are gathered."""
        return {id(p): place for place, groups in self._groups.items() for group in groups for p in group.trained()}

    def _settle(self, place: int) -> None:
        """Wait for these gradients, and drop those that no rank has had: FSDP2 has reduced zeros."""
        for group in self._groups[place]:
            group.wait()
        unused = self._shards.unused(self._groups[place])
        if self._ranks.sum_number(len(unused)):
            self._shards.drop(set.intersection(*map(set, self._ranks.gather(unused))))
