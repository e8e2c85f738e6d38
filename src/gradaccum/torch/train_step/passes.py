"""The forward and backward passes of a batch's micro-batches."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.sizes import Plan, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OneRow
from gradaccum.on_torch.state import Snapshot
from gradaccum.torch.loss import MIXED_TERMS, LossAccumulator, Term, Terms, TermsAccumulator, WeightedLoss

__all__ = ["CountingPasses", "TrainPasses"]

Runner = Any
"""A `WindowRunner`, which is made of these passes."""

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


class TrainPasses:
    """Runs the micro-batches of one batch, each in two calls."""

    def __init__(self, runner: Runner, window: LossAccumulator | TermsAccumulator, batch: Batch) -> None:
        self.window, self._runner, self._batch, self._rows = window, runner, batch, batch.rows
        self._batcher, self._norm, self._layers = runner.shared.batcher, runner.shared.batch_norm, runner.shared.layers
        self._scaler, self._noise = runner.scaler, runner.noise
        self._sharded = runner.ranks.sharded and self._layers is None
        self._moves = not runner.state.idle  # while a window runs, that stays so

    def take(self, piece: Slice) -> Batch:
        """The micro-batch of a slice."""
        return self._batcher.take(self._batch, piece)

    def forward(self, piece: Slice) -> WeightedLoss:
        """The forward pass of a slice."""
        rows = piece.rows
        micro_batch = self._batch.take(rows) if type(rows) is slice else self._batcher.take(self._batch, piece)
        try:
            if self._layers is None and self._norm.idle and self._noise is None:  # as mostly
                return self.window.forward(micro_batch)
            layers: Any = _NO_CONTEXT
            if self._layers is not None:
                retake = functools.partial(self.take, piece)
                layers = self._layers.micro_batch(retake, self.window.objective.evaluate)
            with self._norm.micro_batch(), layers:
                return self.window.forward(micro_batch, self._noise is not None and self._noise.waiting)
        except ValueError as error:
            if piece.size == 1 and "more than 1 value per channel" in str(error):  # torch.nn.functional's
                raise OneRow(_ONE_ROW.format(error=error)) from error
            raise

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        """The backward pass of a slice, which counts from here on."""
        loss, window, noise, layers = weighted.loss, self.window, self._noise, self._layers
        if loss is not None:
            window.retain_graph = layers is not None and layers.shares(loss)
            window.backward(weighted, loss if self._scaler is None else self._scaler.scale(loss))
        elif self._sharded and weighted.weightless is not None:
            self._backward_of_nothing(weighted.weightless)
        elif self._sharded:
            self.idle(self.take(piece))
        if layers is not None:
            layers.commit(piece)
        window.add(weighted)
        if noise is not None and noise.waiting and loss is not None:
            noise.counts_rows = True
            sums, multiple = self._runner.shared.buffer.gradients(), window.multiple(weighted, piece.size)
            noise.micro_batch(sums, piece.size, self._runner.scale() * multiple)
        if not self._norm.idle:
            self._norm.commit()
        if self._moves and (loss is not None or weighted.weightless is not None) and piece.size < self._rows:
            moved = self._runner.state.moved()
            self._runner.buffers.micro_batch(moved, piece.size)  # else it is the large batch, or was left out

    def idle(self, micro_batch: Batch) -> None:
        """A forward and a backward pass that count nothing: the other ranks of a sharded model wait for them."""
        runner = self._runner
        with runner.shared.oom.around(), runner.shared.as_found():
            try:
                loss = self.window.objective.forward(micro_batch)[0]
            except (RuntimeError, ValueError, IndexError) as error:
                if micro_batch.rows or is_out_of_memory(error) or isinstance(error, WindowError):
                    raise
                raise ValueError(_NO_ROWS.format(error=error)) from error
            self._backward_of_nothing(loss)

    def _backward_of_nothing(self, loss: Tensor) -> None:
        self._runner.ranks.scale(0.0, idle=True)
        try:
            loss.backward()
        finally:
            self._runner.ranks.scale(1.0)


class CountingPasses:
    """Forward passes that find out what the terms of a loss weigh, before the passes that count.

    Without gradients, unless the loss needs some of its own, as a gradient penalty does.
    """

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self._runner, self._batch, self._objective = runner, batch, runner.plain
        self.found: list[Terms] = []
        """The terms of each micro-batch, without graphs."""

    def run(self, plan: Plan) -> list[Terms]:
        """The terms of each micro-batch; nothing where the loss turns out to be a single one."""
        self.found = []
        for piece in plan:
            buffers = Snapshot.of(self._runner.shared.parts())  # each of them finds what the first one does
            self._runner.shared.oom.run(piece, plan, self)
            buffers.put_back()
            if not self._objective.found.terms:
                break
        return self.found

    def forward(self, piece: Slice) -> Terms | None:
        """The forward pass of a slice. Returns its terms; None where the loss is a single one."""
        with self._runner.shared.batch_norm.micro_batch():
            if not self._objective.found.needs_gradients:
                try:
                    return self._terms(piece, False)
                except RuntimeError as error:
                    if is_out_of_memory(error) or "does not require grad" not in str(error):
                        raise
                    self._objective.found.needs_gradients = True
            return self._terms(piece, True)

    def _terms(self, piece: Slice, gradients: bool) -> Terms | None:
        with torch.set_grad_enabled(gradients):
            _, terms = self._objective.evaluate(self._runner.shared.batcher.take(self._batch, piece))
        if not isinstance(terms, dict):
            if self.found:
                raise ValueError(MIXED_TERMS)
            return None
        return {name: Term(term.loss.detach(), term.weight) for name, term in terms.items()}

    def backward(self, piece: Slice, terms: Terms | None) -> None:
        """There is none: the slice is counted."""
        if terms is not None:
            self.found.append(terms)
