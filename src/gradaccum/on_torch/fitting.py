"""Micro-batches that may not fit: measured for those who search for the size, and run again where memory ran out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from gradaccum.core.sizes import Piece, Rows, Tokens
from gradaccum.on_torch.memory import Gauge, is_out_of_memory
from gradaccum.on_torch.transaction import Transaction

__all__ = ["Fitting", "OneRow", "Passes", "StartOver", "nothing_fits"]

logger = logging.getLogger("gradaccum")


Coupled = Callable[[], bool]
"""Tells whether a row's gradient depends on the rows beside it."""

_NONE_ALONE = "The model can't take one row alone: all over again in micro-batches that leave none."
_OVER = "Out of memory in the backward pass of a micro-batch of %d rows that %s: all over again with %d rows."
_DREW = "drew random numbers, as dropout does"
_TOGETHER = "BatchNorm has normalised together"


def never() -> bool:
    """No."""
    return False


class Passes(Protocol):
    """The two passes of each micro-batch."""

    def forward(self, piece: Piece, /) -> Any:
        """Run the forward pass. Returns what the backward pass needs."""

    def backward(self, piece: Piece, forwarded: Any, /) -> None:
        """Run the backward pass, and count the micro-batch."""


class StartOver(Exception):  # no error: the window runs again
    """The window has to begin again, in the smaller micro-batches that its plan knows of by now."""


class OneRow(ValueError):
    """The model can't take a micro-batch of one row, as BatchNorm can't."""


class Fitting:
    """Runs the pieces of a window, each as a transaction.

    Args:
        transaction: What a micro-batch changes.
        gauge: What it costs.
    """

    def __init__(
        self, transaction: Transaction, gauge: Gauge, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.transaction = transaction
        """What a micro-batch changes."""
        self.around = around
        """A context for forward passes."""
        self._gauge = gauge

    def run(
        self, piece: Piece, plan: Rows | Tokens, passes: Passes, *, anew: bool = False, coupled: Coupled = never
    ) -> None:
        """One micro-batch; where it does not fit, the same rows in smaller ones.

        Args:
            piece: Its rows.
            plan: Where smaller ones come from.
            passes: The two passes.
            anew: Start over where it does not fit, whatever has arrived.
            coupled: Tells whether a row's gradient depends on the rows beside it, as with BatchNorm: start over
                then, where gradients have arrived.

        Raises:
            torch.OutOfMemoryError: Even one row does not fit, or as few as the model can take.
            ValueError: It can't take one, and memory had no part in that.
            StartOver: The failed backward pass has left gradients that belong to random numbers already drawn, or to
                rows that are together no more; the failed micro-batch has moved what nobody knew to move; or a split
                would leave one row alone.
        """
        try:
            self._run(piece, plan, passes, anew, coupled)
        except OneRow as error:
            if not plan.lowered:
                raise ValueError(str(error)) from error
            if not plan.refused():
                raise nothing_fits(error, "more than one row") from error
        else:
            return
        logger.warning(_NONE_ALONE)  # an earlier batch ran out of memory with one row
        raise StartOver

    def _run(self, piece: Piece, plan: Rows | Tokens, passes: Passes, anew: bool, coupled: Coupled) -> None:
        try:
            self.once(piece, plan, passes)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            alone = plan.indivisible(piece)
            if alone is not None:
                raise nothing_fits(error, alone) from error
        # Only here, out of reach of the error's frames, is its memory free.
        self._gauge.release()
        arrived = self.transaction.arrived()
        # Smaller micro-batches draw other dropout masks, which would go with these gradients to no common loss.
        drew = bool(arrived) and self.transaction.drew_in_micro_batch()
        unseen = not self.transaction.restore()
        final = piece.size <= 2 or plan.failed_before(piece)
        pieces = plan.failed(piece)
        if drew or (arrived and coupled()):
            logger.warning(_OVER, piece.size, _DREW if drew else _TOGETHER, pieces[0].size)
            raise StartOver
        if anew or unseen:
            logger.warning(
                "Out of memory with %d rows: all over again in micro-batches of %d.",
                piece.size,
                pieces[0].size,
            )
            raise StartOver
        logger.warning(
            "Out of memory with a micro-batch of %d rows: going on with %d. Nothing else of the batch is lost.",
            piece.size,
            pieces[0].size,
        )
        aside, rest = _PutAside(arrived), self.transaction.not_looked_at() if arrived else None
        try:
            for smaller in pieces:
                for fitting in plan.fitting(smaller):
                    self._run(fitting, plan, passes, False, coupled)
        except OneRow as error:
            if final:
                plan.refused()
                raise nothing_fits(error, "more than one row") from error
            logger.warning(_NONE_ALONE)
            raise StartOver from None
        finally:
            aside.take_back()
        if rest is not None and self.transaction.drew_from(rest):
            logger.warning(_OVER, piece.size, _DREW, pieces[0].size)
            raise StartOver

    def give_up(self) -> None:
        """The window's passes are over before their time: free what the device keeps, and put buffers back."""
        self._gauge.release()
        if self.transaction.began:
            self.transaction.restore()

    def once(self, piece: Piece, plan: Rows | Tokens, passes: Passes) -> None:
        """One micro-batch, whether it fits or not. What it cost is told to a plan that measures."""
        if plan.measuring:
            self._measured(piece, plan, passes)
            return
        self.transaction.begin()
        passes.backward(piece, self._forward(piece, passes))
        self.transaction.commit()

    def _forward(self, piece: Piece, passes: Passes) -> Any:
        with self.around():
            return passes.forward(piece)

    def _measured(self, piece: Piece, plan: Rows | Tokens, passes: Passes) -> None:
        gauge = self._gauge
        gauge.synchronize()
        base, mark, began = gauge.live(), gauge.mark(), time.perf_counter()
        self.transaction.begin()
        forwarded = self._forward(piece, passes)
        live = gauge.live()
        passes.backward(piece, forwarded)
        gauge.synchronize()
        seconds, highest = time.perf_counter() - began, gauge.mark()
        self.transaction.commit()
        # The mark tells this micro-batch's peak where it has risen; else what was alive before backward has to do.
        plan.record(piece, seconds, base, highest if highest > mark else live)


def nothing_fits(error: Exception, rows: str = "one row") -> torch.OutOfMemoryError:
    """What to say where even one row does not fit, or as few as can be."""
    return torch.OutOfMemoryError(
        f"Out of memory with a micro-batch of {rows}: {error}\nNo update was made; parameters, optimizer state and "
        "buffers are as they were. Make the model's activations smaller (gradient checkpointing, half precision), or "
        "the rows shorter."
    )


class _PutAside:
    """Sums of gradients that already include the micro-batch that is to run again, kept out of its reach.

    What arrives meanwhile is dropped as it arrives, so that it takes no memory.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._sums = [(parameter, parameter.grad) for parameter in parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_drop) for parameter in parameters if parameter.requires_grad
        ]
        for parameter in parameters:
            parameter.grad = None

    def take_back(self) -> None:
        """Put the sums back in place."""
        for hook in self._hooks:
            hook.remove()
        for parameter, gradient in self._sums:
            parameter.grad = gradient


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
