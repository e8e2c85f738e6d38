"""Passes of a sharded model, which all ranks run together or block by block, and what happens where memory runs out.

A sharded model gathers parameters in each pass, and every rank waits there for every other. So before each collective
of the model the ranks exchange a message over a process group of their own: "I am about to begin this one", or "memory
ran out here". No rank begins a collective that not all others are about to begin:

- All of them have exchanged the same messages so far, each of which named the same collective on all ranks. Those
  collectives have been begun by all, and so they end.
- From there each rank comes to its next message, whatever happens in between: to the next collective, to the end of its
  passes, to an error. None waits in a collective in the meantime, so none misses the others' messages.
- Where memory ran out on some, all learn it from the same message, leave their pass, forget the window's passes, and
  begin again in smaller micro-batches. Another error leaves a message, too, and is an error on every rank.

Collectives that the model makes by itself, beside FSDP2's, are not asked for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradaccum.core.sizes import Plan, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow, nothing_fits
from gradaccum.on_torch.private import ShardedGroup
from gradaccum.torch.distributed.fsdp import RankOutOfMemory, Shards

logger = logging.getLogger("gradaccum")


class ByBlocks:
    """Gathers the parameters of a sharded model for its blocks' turns, and reduces their gradients after these.

    All ranks come to the same collectives in the same order, whatever micro-batches they have, even none:

        gather what stands outside of the blocks, and each block         before the forward passes; or, with
                                                                         sync="micro_batch", a block for each of its
                                                                         calls, as often as on the rank with most
        gather a block, if it isn't; its backward passes; reduce it      for each block, the last one first
        reduce what stands outside                                       at the end

    What is sharded together with something outside of a block, or with another block, counts as outside. Of a model
    that isn't sharded nothing is gathered.
    """

    def __init__(self, ranks: Any = None, model: nn.Module | None = None, blocks: Sequence[nn.Module] = ()) -> None:
        self._ranks, self._model, self._blocks = ranks, model or nn.Module(), [*blocks]
        self._shards: Shards | None = ranks.engine if ranks is not None and ranks.sharded else None
        self._groups: dict[int, list[ShardedGroup]] = {}
        """By the place of the block that they are gathered for; -1 stands for what is outside."""
        self._one_by_one, self._due = self._shards is not None and self._shards.always, 0
        """Whether a forward pass gathers one block at a time; how many such passes are to come."""
        self._tail: int | None = None
        for path, module in self._model.named_modules() if self._shards is not None else ():
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{path!r} is a SyncBatchNorm, which waits for the other ranks in every pass, and with `blocks` "
                    "each rank of a sharded model runs its own number of passes. Use GroupNorm, or leave out `blocks`."
                )

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Around the passes of a window: what stands outside of the blocks is gathered."""
        if self._shards is None:
            yield
            return
        with self._shards.in_turns() as groups:
            self._groups = self._by_place(groups)
            self._gather(-1)
            yield
            self._shard([-1])  # gathered once more, where backward ran twice

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
        if self._shards is not None:
            for group in self._groups[place]:
                group.gather()
            self._shards.watch(self._groups[place])

    def _shard(self, places: Sequence[int], frees: bool = True) -> None:
        for group in [group for place in places for group in self._groups.get(place, ())]:
            if frees or not group.stays_gathered:
                group.shard()

    def agree(self, passes: int) -> None:
        """So many micro-batches come on this rank: all ranks are told, where they have to know."""
        if self._one_by_one:
            self._due = self._ranks.most_passes(passes)

    @contextlib.contextmanager
    def forward(self, *, frees: bool = False, tail: int | None = None) -> Iterator[None]:
        """Around all forward passes. `frees`: blocks are sharded then that FSDP2 would keep gathered; those from the
        place `tail` on stay gathered, as they have gradients by then."""
        places, self._tail = range(len(self._blocks)), tail
        for place in places[tail:] if self._one_by_one else places:
            self._gather(place)
        yield
        for _ in range(self._due):  # other ranks have more micro-batches
            for place in places[:tail]:
                with self.call(place):
                    pass
        self._shard(places[:tail], frees)

    def call(self, place: int) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch's call of the block at this place, in a forward pass."""
        due = self._one_by_one and place in range(len(self._blocks))[: self._tail]
        return self._gathered(place) if due else contextlib.nullcontext()

    @contextlib.contextmanager
    def _gathered(self, place: int) -> Iterator[None]:
        self._gather(place)
        yield
        self._shard([place])
        self._due -= place == 0

    @contextlib.contextmanager
    def backward(self, place: int, *, used: bool = False) -> Iterator[None]:
        """Around all backward passes of the block at this place, which is gathered, and reduced at the end; -1: of
        what stands before the blocks, the last. `used`: its gradients are used before all others are there."""
        self._gather(-1)
        self._gather(place)
        yield
        for group in self._groups.get(place, ()):
            group.reduce()
        if used:
            self._settle(place)
        late = [p for p, groups in self._groups.items() if place < 0 and any(group.pending() for group in groups)]
        if late:
            path = next(name for name, module in self._model.named_modules() if module is self._blocks[late[0]])
            raise WindowError(
                f"The block {path!r} got a gradient after its turn, when its gradients had been reduced: another "
                "module uses its weights without registering them. Register them there, or leave the block out of "
                "`blocks`."
            )

    def add_up(self, place: int = -1) -> None:
        """A micro-batch's backward pass is over, of the block at this place or of what stands outside of the blocks:
        gradients in a dtype of their own join the sums."""
        for group in [group for each in {-1, place} for group in self._groups.get(each, ())]:
            if group.sums_apart:
                group.add_up()

    def places(self) -> dict[int, int]:
        """After which block's turn parameters have their gradients: places by the ids of those that the optimizer
        knows, which are not in the modules while these are gathered."""
        return {id(p): place for place, groups in self._groups.items() for group in groups for p in group.trained()}

    def _settle(self, place: int) -> None:
        """Wait for these gradients, and drop those that no rank has had: FSDP2 has reduced zeros."""
        if self._shards is not None:
            for group in self._groups[place]:
                group.wait()
            unused = self._shards.unused(self._groups[place])
            if self._ranks.sum_number(len(unused)):
                self._ranks.drop_common(unused)


def run_together(
    ranks: Any,
    oom: OomRetry,
    plan: Plan,
    passes: Any,
    rows: int,
    least: int = 1,
    at_once: Callable[[], None] | None = None,
) -> None:
    """Run the micro-batches of a large batch where all ranks run their passes together: as many on every rank.

    A rank cuts its rows into as many micro-batches, of `least` rows or more, as the rank with the most has; one that
    has too few rows for that runs passes that count nothing. `at_once` runs all, in place of one after the other.
    """
    pieces = list(plan)
    most = ranks.most_passes(len(pieces))
    if at_once is None and rows:
        pieces = plan.in_passes(most, least)
    filler = running = min(pieces, key=lambda piece: piece.tokens, default=Slice(slice(0, rows)))

    def run() -> None:
        nonlocal running
        if at_once is not None:
            at_once()
        else:
            for running in pieces:  # read by whoever catches an error
                oom.once(running, plan, passes)
        running = filler
        for _ in range(most - len(pieces)):
            passes.idle(passes.take(filler))

    _run(ranks.engine, oom, plan, run, lambda: running)


def run_by_blocks(ranks: Any, by_blocks: ByBlocks, oom: OomRetry, plan: Plan, run: Callable[[], None]) -> None:
    """Run the micro-batches of a large batch, none maybe, where ranks of a sharded model meet at blocks."""
    if not ranks.sharded:
        run()
        return
    pieces = list(plan)
    largest = max(pieces, key=lambda piece: piece.tokens, default=Slice(slice(0, 0)))
    by_blocks.agree(len(pieces))
    _run(ranks.engine, oom, plan, run, lambda: largest)


def _run(shards: Shards, oom: OomRetry, plan: Plan, run: Callable[[], None], running: Callable[[], Slice]) -> None:
    """Run the passes of a window. Where memory runs out on a rank, all begin the batch again, in smaller slices."""
    shards.begin()
    try:
        run()
        shards.end()
        return
    except Exception as error:
        smaller = isinstance(error, RestartWindow)  # this rank has taken a smaller size already
        if not (smaller or shards.failure is not None or is_out_of_memory(error)):
            raise
        piece = running()
        alone = None if smaller else plan.indivisible(piece) if piece.size else "no row"
        cost = 2 * plan.size if smaller else piece.tokens
        found = shards.ran_out(cost, final=alone is not None)
        if found.final:
            raise _final(error, found, alone) from error
    oom.meter.release()  # only here, out of reach of the error's frames, is its memory free
    shards.start_over()
    cost = min(found.costs.values())
    fewer = plan.too_large(cost) if plan.size > cost // 2 else plan  # where slices are small already, they stay
    logger.warning("Out of memory on %s: all ranks begin the batch again, in smaller micro-batches.", found.ranks)
    raise RestartWindow(fewer)


def _final(error: Exception, found: RankOutOfMemory, alone: str | None) -> torch.OutOfMemoryError:
    if not isinstance(error, RankOutOfMemory):
        if alone is not None:
            return nothing_fits(error, alone)
        return torch.OutOfMemoryError(
            f"{error}\nNo update was made on any rank. Give a smaller `micro_batch_size` or `max_tokens`."
        )
    return torch.OutOfMemoryError(
        f"Out of memory on {found.ranks}, with the smallest possible micro-batch. No update was made on any rank. Look "
        "at that rank's own error."
    )
