"""Passes that all ranks of a sharded model run together, and what becomes of them where memory runs out on one.

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

import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch

from gradaccum.core.sizes import Plan, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow, nothing_fits
from gradaccum.torch.distributed.by_blocks import ByBlocks
from gradaccum.torch.distributed.fsdp import Shards
from gradaccum.torch.distributed.single_rank import RankOutOfMemory, SingleRank

__all__ = ["DIFFERENT_PASSES", "Together", "run_by_blocks", "run_together"]

logger = logging.getLogger("gradaccum")

DIFFERENT_PASSES = (
    "A sharded model needs the same passes on every rank, and the ranks ran different parts of it: a head that the "
    "batch chooses, perhaps, where a rank whose batches are used up repeated its last micro-batch. Nothing was "
    "updated. Give all ranks batches of the same kind and number, or shard such parts together with the whole model."
)

_AGAIN, _FINAL = 1, 2
"""In a message: memory ran out; smaller micro-batches may do, or nothing will."""


class Together:
    """Has the ranks ask each other before each collective of a sharded model.

    `exchange` sends numbers, and returns every rank's, behind one that says what they are about.
    """

    def __init__(self, shards: Shards, exchange: Callable[..., list[list[float]]]) -> None:
        self.shards = shards
        self._exchange = exchange
        self.failure: RankOutOfMemory | None = None
        """What the ranks know of each other."""

    def begin(self) -> None:
        """The passes of a window begin."""
        self.failure = None
        self.shards.ask_before(self.meet)

    def end(self) -> None:
        """They are over; the reduction is to come."""
        self.meet("")

    def meet(self, name: str, number: float = 0.0) -> float:
        """A collective is about to begin, or a sharded part's forward pass; `""`: all passes are done.

        Returns the largest number that a rank has come with; a RankOutOfMemory where some ranks won't come.
        """
        if self.failure is not None:  # code of the user's has gone on after the error
            raise self.failure
        messages = self._exchange(zlib.crc32(name.encode()), 0, 0, number)
        self._hear(messages)
        if self.failure is not None:
            raise self.failure
        if len({numbers[1] for numbers in messages}) > 1:
            raise WindowError(f"{DIFFERENT_PASSES} This rank has come to {name or 'the end'!r}.")
        return max(numbers[4] for numbers in messages)

    def ran_out(self, cost: int, *, final: bool) -> RankOutOfMemory:
        """Tell the other ranks that memory ran out here. Returns what they all know by now."""
        if self.failure is None:
            self._hear(self._exchange(0, _FINAL if final else _AGAIN, cost))
        assert self.failure is not None
        return self.failure

    def _hear(self, messages: list[list[float]]) -> None:
        costs = {rank: int(numbers[3]) for rank, numbers in enumerate(messages) if numbers[2]}
        if costs:
            final = any(numbers[2] == _FINAL for numbers in messages)
            self.failure = RankOutOfMemory(costs, final)

    def reduce(self) -> None:
        """Reduce the window's sum."""
        try:
            self.shards.reduce()
        except RankOutOfMemory as found:
            raise torch.OutOfMemoryError(
                f"Memory ran out on {found.ranks} while the gradients of a sharded model were reduced, which smaller "
                "micro-batches cannot help. No update was made."
            ) from None
        except Exception as error:
            if self.shards.asks and is_out_of_memory(error):
                self.ran_out(0, final=True)
            raise
        self._stop()

    def start_over(self) -> None:
        """Forget the passes that failed."""
        self._stop()
        self.shards.start_over()

    def abort(self) -> None:
        """An error: the passes will not be finished."""
        if self.shards.asks:
            self.start_over()

    def _stop(self) -> None:
        self.failure = None
        self.shards.ask_before(None)


def run_together(
    ranks: SingleRank,
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
    filler = min(pieces, key=lambda piece: piece.tokens, default=Slice(slice(0, rows)))
    running = filler
    ranks.begin_passes()
    try:
        if at_once is not None:
            at_once()
        else:
            for piece in pieces:
                running = piece
                oom.once(piece, plan, passes)
        running = filler
        for _ in range(most - len(pieces)):
            passes.idle(passes.take(filler))
        ranks.end_passes()
        return
    except Exception as error:
        found = _what_ranks_know(error, ranks, plan, running)
    _begin_again(found, ranks, oom, plan)


def run_by_blocks(ranks: SingleRank, by_blocks: ByBlocks, oom: OomRetry, plan: Plan, run: Callable[[], None]) -> None:
    """Run the micro-batches of a large batch, none maybe, where ranks of a sharded model meet at blocks, not in
    passes.
    """
    if not ranks.sharded:
        run()
        return
    pieces = list(plan)
    largest = max(pieces, key=lambda piece: piece.tokens, default=Slice(slice(0, 0)))
    by_blocks.agree(len(pieces))
    ranks.begin_passes()
    try:
        run()
        ranks.end_passes()
        return
    except Exception as error:
        found = _what_ranks_know(error, ranks, plan, largest)
    _begin_again(found, ranks, oom, plan)


def _what_ranks_know(error: Exception, ranks: SingleRank, plan: Plan, running: Slice) -> RankOutOfMemory:
    """What the ranks know of each other, now that this error has ended passes on this one."""
    smaller = isinstance(error, RestartWindow)  # `at_once` has taken a smaller size already
    if not (smaller or ranks.failure is not None or is_out_of_memory(error)):
        raise error
    alone = None if smaller else plan.indivisible(running) if running.size else "no row"
    cost = 2 * plan.size if smaller else running.tokens
    found = ranks.ran_out(cost, final=alone is not None)
    if found.final:
        raise _final(error, found, alone) from error
    return found


def _begin_again(found: RankOutOfMemory, ranks: SingleRank, oom: OomRetry, plan: Plan) -> None:
    """Have all ranks begin the batch again. Out of reach of the error's frames, so that their memory is free."""
    oom.meter.release()
    ranks.start_over()
    cost = min(found.costs.values())
    smaller = plan.too_large(cost) if plan.size > cost // 2 else plan  # where slices are small already, they stay
    logger.warning("Out of memory on %s: all ranks begin the batch again, in smaller micro-batches.", found.ranks)
    raise RestartWindow(smaller)


def _final(error: Exception, found: RankOutOfMemory, alone: str | None) -> torch.OutOfMemoryError:
    if not isinstance(error, RankOutOfMemory):
        if alone is not None:
            return nothing_fits(error, alone)
        return torch.OutOfMemoryError(
            f"{error}\nNo update was made on any rank. Give a smaller `micro_batch_size` or `max_tokens`."
        )
    return torch.OutOfMemoryError(
        f"Out of memory on {found.ranks}, with the smallest micro-batch there is. No update was made on any rank. Look "
        "at the message there."
    )
