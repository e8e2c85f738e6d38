"""Micro-batches that may not fit: measured for those who search for the size, and run again where memory ran out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from gradaccum.on_torch.memory import Gauge, is_out_of_memory
from gradaccum.on_torch.transaction import PutAside, Transaction
from gradaccum.sizes import Piece, Rows, Tokens

__all__ = ["Fitting", "MicroBatch", "nothing_fits"]

MicroBatch = Callable[[Piece, Callable[[], None] | None], None]
"""Runs the forward and backward pass of a piece, and calls what it is given, if anything, between the two."""

logger = logging.getLogger("gradaccum")


class Fitting:
    """Runs the pieces of a window, each as a transaction.

    Args:
        transaction: What a micro-batch changes.
        gauge: What it costs.
    """

    def __init__(self, transaction: Transaction, gauge: Gauge) -> None:
        self._transaction = transaction
        self._gauge = gauge

    def run(self, piece: Piece, plan: Rows | Tokens, micro_batch: MicroBatch) -> None:
        """One micro-batch; where it does not fit, the same rows in smaller ones.

        Raises:
            torch.OutOfMemoryError: Even one row does not fit.
        """
        try:
            self.once(piece, plan, micro_batch)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if piece.size == 1:
                raise nothing_fits(error) from error
        # Only here, out of reach of the error's frames, is its memory free.
        self._gauge.release()
        arrived = self._transaction.arrived()
        self._transaction.restore()
        pieces = plan.failed(piece)
        logger.warning(
            "Out of memory with a micro-batch of %d rows: going on with %d. Nothing else of the batch is lost.",
            piece.size,
            pieces[0].size,
        )
        aside = PutAside(arrived)
        try:
            for smaller in pieces:
                for fitting in plan.fitting(smaller):
                    self.run(fitting, plan, micro_batch)
        finally:
            aside.take_back()

    def once(self, piece: Piece, plan: Rows | Tokens, micro_batch: MicroBatch) -> None:
        """One micro-batch, whether it fits or not. What it cost is told to a plan that measures."""
        if plan.measuring:
            self._measured(piece, plan, micro_batch)
            return
        self._transaction.begin()
        micro_batch(piece, None)
        self._transaction.commit()

    def _measured(self, piece: Piece, plan: Rows | Tokens, micro_batch: MicroBatch) -> None:
        gauge = self._gauge
        gauge.synchronize()
        base, mark, began = gauge.live(), gauge.mark(), time.perf_counter()
        live = base

        def between() -> None:
            nonlocal live
            live = gauge.live()

        self._transaction.begin()
        micro_batch(piece, between)
        self._transaction.commit()
        gauge.synchronize()
        seconds, highest = time.perf_counter() - began, gauge.mark()
        # The mark tells this micro-batch's peak where it has risen; else what was alive before backward has to do.
        plan.record(piece, seconds, base, highest if highest > mark else live)


def nothing_fits(error: Exception) -> torch.OutOfMemoryError:
    """What to say where even one row does not fit."""
    return torch.OutOfMemoryError(
        f"Out of memory with a micro-batch of one row: {error}\nNo update was made; parameters, optimizer state and "
        "buffers are as they were. Make the model's activations smaller (gradient checkpointing, half precision), or "
        "the rows shorter."
    )
