"""The forward and backward passes of a batch's micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Piece, Rows, Tokens
from gradaccum.errors import WindowError
from gradaccum.on_torch import random_state
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.buffers import as_found
from gradaccum.on_torch.fitting import Fitting, OneRow, StartOver
from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.distributed import SingleRank
from gradaccum.torch.layers import Layers
from gradaccum.torch.loss import MIXED_TERMS, LossAccumulator, Objective, Term, Terms, TermsAccumulator, WeightedLoss
from gradaccum.torch.train_step.update import Update

__all__ = ["Passes", "count_terms"]


_NO_CONTEXT = contextlib.nullcontext()

_ONE_ROW = (
    'BatchNorm can\'t normalise a micro-batch of one row by itself: {error}. Use batch_norm="exact", which normalises '
    "over the whole batch, or a `micro_batch_size` that leaves no single row: 2 for an even number of rows, 3 or more "
    "for any. A batch of one row has nothing to normalise over at all."
)
_NO_ROWS = (
    "Other ranks of a sharded model wait for a pass for which this rank has no rows, and the model or the loss can't "
    "run on none: {error}. Give each rank of each batch at least as many rows as there are micro-batches, or write "
    "sizes out: x.view(-1, width) takes no rows, x.view(len(x), -1) doesn't."
)


class Passes:
    """Runs the micro-batches of one batch, each in two calls.

    Args:
        window: Weighs their losses and adds them up.
        take: Returns the micro-batch of a piece.
        update: What their gradients are summed for.
        batch_norm: What is done about BatchNorm.
        ranks: The other ranks.
        fitting: Runs micro-batches.
        buffers: Those of the window.
        rows: Of the batch.
        layers: The blocks of the model, where their backward passes wait for those of all micro-batches.
    """

    def __init__(
        self,
        window: LossAccumulator | TermsAccumulator,
        take: Callable[[Piece], Batch],
        update: Update,
        batch_norm: BatchNormPolicy,
        ranks: SingleRank,
        fitting: Fitting,
        buffers: WindowBuffers,
        rows: int,
        layers: Layers | None = None,
    ) -> None:
        self.window, self.take, self._layers = window, take, layers
        self._update, self._batch_norm = update, batch_norm
        self._ranks, self._transaction, self._around = ranks, fitting.transaction, fitting.around
        self._sharded = ranks.sharded and layers is None
        self._buffers, self._rows = buffers, rows
        buffers.open()

    def forward(self, piece: Piece) -> WeightedLoss:
        """The forward pass of a piece."""
        micro_batch, noise = self.take(piece), self._update.noise
        measured = noise is not None and noise.waiting
        layers: Any = _NO_CONTEXT
        if self._layers is not None:
            layers = self._layers.micro_batch(functools.partial(self.take, piece), self.window.objective.evaluate)
        try:
            with _NO_CONTEXT if self._batch_norm.idle else self._batch_norm.micro_batch(), layers:
                return self.window.forward(micro_batch, measured)
        except ValueError as error:
            if piece.size == 1 and "more than 1 value per channel" in str(error):  # torch.nn.functional's
                raise OneRow(_ONE_ROW.format(error=error)) from error
            raise

    def backward(self, piece: Piece, weighted: WeightedLoss) -> None:
        """The backward pass of a piece, which counts from here on."""
        loss, scaler, noise = weighted.loss, self._update.scaler, self._update.noise
        if loss is not None:
            self.window.retain_graph = self._layers is not None and self._layers.shares(loss)
            self.window.backward(weighted, loss if scaler is None else scaler.scale(loss))
        elif self._sharded and weighted.weightless is not None:
            self._backward_of_nothing(weighted.weightless)
        elif self._sharded:
            self.idle(self.take(piece))
        if self._layers is not None:
            self._layers.commit(piece)
        self.window.add(weighted)
        if noise is not None and noise.waiting and loss is not None:
            self._update.measure(self.window.multiple(weighted, piece.size), piece.size)
        if not self._batch_norm.idle:
            self._batch_norm.commit()
        ran = loss is not None or weighted.weightless is not None  # what weighs nothing may be left out
        if ran and piece.size < self._rows:  # else it is the large batch
            self._buffers.micro_batch(self._transaction.moved(), piece.size)

    def idle(self, micro_batch: Batch) -> None:
        """A forward and a backward pass that count nothing: the other ranks of a sharded model wait for them."""
        self._transaction.begin()
        with self._around():
            try:
                loss = self.window.objective.forward(micro_batch)[0]
            except (RuntimeError, ValueError, IndexError) as error:
                if micro_batch.rows or is_out_of_memory(error) or isinstance(error, WindowError):
                    raise
                raise ValueError(_NO_ROWS.format(error=error)) from error
        self._backward_of_nothing(loss)
        self._transaction.restore()

    def _backward_of_nothing(self, loss: Tensor) -> None:
        self._ranks.scale(0.0, idle=True)
        try:
            loss.backward()
        finally:
            self._ranks.scale(1.0)


def count_terms(
    objective: Objective,
    take: Callable[[Piece], Batch],
    plan: Callable[[], Rows | Tokens],
    fitting: Fitting,
    batch_norm: BatchNormPolicy,
    modules: list[nn.Module],
) -> list[Terms]:
    """Forward passes alone, to see what several losses divide by. Random numbers and buffers stay as they are.

    Args:
        objective: The loss.
        take: Returns the micro-batch of a piece.
        plan: Returns the pieces.
        fitting: Runs them.
        batch_norm: What is done about BatchNorm.
        modules: Whose buffers may move.

    Returns:
        The terms of each micro-batch; nothing where the loss turns out to be a single one.
    """
    device, everything = objective.device, [inner for module in modules for inner in module.modules()]
    while True:
        counting, pieces = _Counting(objective, take, batch_norm, fitting, WindowBuffers(modules)), plan()
        own = held_generators(objective.evaluate, *modules)
        kept = random_state.kept([*random_state.all_generators([device]), *own])
        try:
            with kept, as_found(everything, device), batch_norm.window():
                for piece in pieces:
                    fitting.run(piece, pieces, counting)
                    if not objective.found.terms:
                        break
            return counting.found
        except StartOver:
            continue


class _Counting:
    """Forward passes that find out what the terms of a loss weigh, before the passes that count.

    Without gradients, unless the loss needs some of its own, as a gradient penalty does.

    Args:
        objective: The loss.
        take: Returns the micro-batch of a piece.
        batch_norm: What is done about BatchNorm.
        fitting: Runs them.
        buffers: What each of them is to find as the first one does.
    """

    def __init__(
        self,
        objective: Objective,
        take: Callable[[Piece], Batch],
        batch_norm: BatchNormPolicy,
        fitting: Fitting,
        buffers: WindowBuffers,
    ) -> None:
        self._objective, self._take, self._batch_norm = objective, take, batch_norm
        self._fitting, self._buffers = fitting, buffers
        self.found: list[Terms] = []
        """The terms of each micro-batch, without graphs."""

    def forward(self, piece: Piece) -> Terms | None:
        """The forward pass of a piece. Returns its terms; None where the loss is a single one."""
        with self._batch_norm.micro_batch():
            if not self._objective.found.needs_gradients:
                try:
                    return self._terms(piece, False)
                except RuntimeError as error:
                    if is_out_of_memory(error) or "does not require grad" not in str(error):
                        raise
                    self._objective.found.needs_gradients = True
            return self._terms(piece, True)

    def _terms(self, piece: Piece, gradients: bool) -> Terms | None:
        with torch.set_grad_enabled(gradients):
            _, terms = self._objective.evaluate(self._take(piece))
        if not isinstance(terms, dict):
            if self.found:
                raise ValueError(MIXED_TERMS)
            return None
        return {name: Term(term.loss.detach(), term.weight) for name, term in terms.items()}

    def backward(self, piece: Piece, terms: Terms | None) -> None:
        """There is none: the piece is counted."""
        self._buffers.micro_batch(self._fitting.transaction.moved(), piece.size)
        if terms is not None:
            self.found.append(terms)
