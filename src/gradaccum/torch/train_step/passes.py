"""The forward and backward passes of a batch's micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.fitting import OneRow
from gradaccum.on_torch.transaction import Transaction
from gradaccum.sizes import Piece
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.distributed import SingleRank
from gradaccum.torch.loss import LossAccumulator, WeightedLoss
from gradaccum.torch.train_step.update import Update

__all__ = ["Passes"]


_NO_CONTEXT = contextlib.nullcontext()

_ONE_ROW = (
    'BatchNorm can\'t normalise a micro-batch of one row by itself: {error}. Use batch_norm="exact", which normalises '
    "over the whole batch, or a `micro_batch_size` that leaves no single row: 2 for an even number of rows, 3 or more "
    "for any. A batch of one row has nothing to normalise over at all."
)


class Passes:
    """Runs the micro-batches of one batch, each in two calls.

    Args:
        window: Weighs their losses and adds them up.
        take: Returns the micro-batch of a piece.
        update: What their gradients are summed for.
        batch_norm: What is done about BatchNorm.
        ranks: The other ranks.
        transaction: What a micro-batch changes.
    """

    def __init__(
        self,
        window: LossAccumulator,
        take: Callable[[Piece], Batch],
        update: Update,
        batch_norm: BatchNormPolicy,
        ranks: SingleRank,
        transaction: Transaction,
    ) -> None:
        self.window, self.take = window, take
        self._update, self._batch_norm = update, batch_norm
        self._ranks, self._transaction = ranks, transaction

    def forward(self, piece: Piece) -> WeightedLoss:
        """The forward pass of a piece."""
        micro_batch, noise = self.take(piece), self._update.noise
        measured = noise is not None and noise.waiting
        try:
            with _NO_CONTEXT if self._batch_norm.idle else self._batch_norm.micro_batch():
                return self.window.forward(micro_batch, measured)
        except ValueError as error:
            if piece.size == 1 and "more than 1 value per channel" in str(error):  # torch.nn.functional's
                raise OneRow(_ONE_ROW.format(error=error)) from error
            raise

    def backward(self, piece: Piece, weighted: WeightedLoss) -> None:
        """The backward pass of a piece, which counts from here on."""
        loss, scaler, noise = weighted.loss, self._update.scaler, self._update.noise
        if loss is not None:
            self.window.backward(weighted, loss if scaler is None else scaler.scale(loss))
        elif self._ranks.in_step and weighted.weightless is not None:
            self._backward_of_nothing(weighted.weightless)
        elif self._ranks.in_step:
            self.idle(self.take(piece))
        self.window.add(weighted)
        if noise is not None and noise.waiting and loss is not None:
            self._update.measure(self.window.multiple(weighted, piece.size), piece.size)
        if not self._batch_norm.idle:
            self._batch_norm.commit()

    def idle(self, micro_batch: Batch) -> None:
        """A forward and a backward pass that count nothing: the other ranks of a sharded model wait for them."""
        self._transaction.begin()
        self._backward_of_nothing(self.window.objective.forward(micro_batch)[0])
        self._transaction.restore()

    def _backward_of_nothing(self, loss: Tensor) -> None:
        self._ranks.scale(0.0, idle=True)
        loss.backward()
        self._ranks.scale(1.0)
