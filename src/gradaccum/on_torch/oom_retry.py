"""Out of memory: the window starts over in smaller micro-batches. Those whose size is searched for are measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from gradaccum.core.sizes import Plan, Slice
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory

logger = logging.getLogger("gradaccum")

_AGAIN = "Out of memory with a micro-batch of %d rows: starting the batch again in micro-batches of at most %d %s."
_NONE_ALONE = "The model can't run on a single row: starting the batch again in micro-batches of two rows or more."


class RestartWindow(Exception):  # no error: the window runs again
    """The window has to begin again: in the micro-batches of this plan, or, without one, as it would begin by now."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan


class OneRow(ValueError):
    """The model can't take a micro-batch of one row, as BatchNorm can't."""


class Passes:
    """The forward and the backward pass of micro-batches: `forward(piece)` returns what `backward(piece, forwarded)`
    needs, which counts it."""

    def forward(self, piece: Slice) -> Any:
        raise NotImplementedError

    def backward(self, piece: Slice, forwarded: Any) -> None:
        raise NotImplementedError

    def both(self, piece: Slice) -> None:
        self.backward(piece, self.forward(piece))


class OomRetry:
    """Runs the micro-batches of a window, and says what is to come after one that did not fit."""

    def __init__(self, meter: MemoryMeter) -> None:
        self.meter = meter

    def run(self, pieces: Iterable[Slice], plan: Plan, passes: Passes) -> None:
        piece: Slice | None = None
        measuring = plan.measuring
        try:
            for piece in pieces:
                if measuring:
                    self.once(piece, plan, passes)
                else:
                    passes.both(piece)
            return
        except Exception as error:
            if piece is None:
                raise
            smaller = self.smaller(error, piece, plan)
        self.meter.release()  # only here, out of reach of the error's frames, is its memory free
        raise RestartWindow(smaller)

    def smaller(self, error: Exception, piece: Slice, plan: Plan) -> Plan:
        """The plan to go on with after this error; else raises it, or what there is to say where nothing fits."""
        if isinstance(error, OneRow):
            if not plan.lowered:
                raise ValueError(str(error)) from error
            if not plan.needs_two_rows():
                raise nothing_fits(error, "more than one row") from error
            logger.warning(_NONE_ALONE)  # an earlier batch ran out of memory with one row
            return plan
        if not is_out_of_memory(error):
            raise error
        alone = plan.indivisible(piece)
        smaller = plan.too_large(piece.tokens) if alone is None else None
        if smaller is None:
            raise nothing_fits(error, alone or f"{piece.size} rows") from error
        logger.warning(_AGAIN, piece.size, smaller.size, "rows" if piece.columns is None else "tokens")
        return smaller

    def once(self, piece: Slice, plan: Plan, passes: Any) -> None:
        """One micro-batch, whether it fits or not. What it cost is told to a plan that measures."""
        meter, measuring = self.meter, plan.measuring
        base = mark = live = 0
        began = 0.0
        if measuring:
            meter.synchronize()
            base, mark, began = meter.live(), meter.mark(), time.perf_counter()
        forwarded = passes.forward(piece)
        if measuring:
            live = meter.live()
        passes.backward(piece, forwarded)
        if measuring:
            meter.synchronize()
            seconds, highest = time.perf_counter() - began, meter.mark()
            # The mark tells this micro-batch's peak where it has risen; else what was alive before backward has to do.
            plan.record(piece, seconds, base, highest if highest > mark else live)


def nothing_fits(error: Exception, rows: str = "one row") -> torch.OutOfMemoryError:
    """What to say where even one row does not fit, or as few as can be."""
    return torch.OutOfMemoryError(
        f"Out of memory with a micro-batch of {rows}: {error}\nNo update was made; parameters, optimizer state and "
        "buffers are as they were. Make the model's activations smaller (gradient checkpointing, half precision), or "
        "the rows shorter."
    )
