"""A window, block by block: from a large batch to its finished gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradaccum.core.sizes import Plan, Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import WindowTotal
from gradaccum.on_torch.oom_retry import OneRow, OomRetry, Passes, RestartWindow
from gradaccum.on_torch.random_state import all_generators
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.stages import gradient_stages, run_stages
from gradaccum.on_torch.state import WindowState, as_found
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.chunking.two_passes import no_word_of_missing_gradients
from gradaccum.torch.layers.schedule import Layers
from gradaccum.torch.loss import BatchLosses, Objective, Terms, WeightedLoss, batch_losses
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.update import Update

_ONE_ROW = (
    "BatchNorm can't normalise a micro-batch of one row by itself: {error}. Give a `micro_batch_size` that leaves no "
    "single row: 2 for an even number of rows, 3 or more for any."
)


class Finished(NamedTuple):
    """What a window leaves beside the gradients."""

    loss: Tensor
    weighs: bool  # False if no row of the batch weighs anything: then there is no gradient
    losses: dict[Hashable, Tensor]  # of several losses, the mean of each
    grad_norm: Tensor | None = None


class BlockRunner:
    """Runs large batches block by block. The finished gradient is in `p.grad` then, or has been used on the way.

    A runner of proofs (`proving`) clips nothing and updates nothing.
    """

    not_proven: Callable[[Batch], None] | None = None
    """Called where a window begins again, because what is known by then may make another proof due."""

    def __init__(
        self,
        objective: Objective,
        layers: Layers,
        update: Update,
        batcher: MicroBatcher,
        batch_norm: BatchNormPolicy,
        oom: OomRetry,
        *,
        proving: bool = False,
    ) -> None:
        self.objective, self.layers, self.batcher, self.batch_norm = objective, layers, batcher, batch_norm
        self.oom, self.proving, self.buffer = oom, proving, update.buffer
        self.stages = gradient_stages({"accumulate_dtype": update.buffer.dtype}) if proving else update.stages
        self.roots = [*objective.modules.values()]
        self.buffers = WindowBuffers()
        self.state = WindowState(
            self.roots,
            objective.device,
            parameters=update.parameters,
            functions=[objective.evaluate],
            # A window can't begin again once blocks have been updated.
            always=proving or layers.listener is not None,
        )

    def rehearse(self, objective: Objective, batch: Batch, sizes: Sequence[int], *, modules_known: bool) -> Tensor:
        """Leave the gradients of these micro-batches, for a proof. Returns the loss.

        `modules_known`: the proof has looked up the modules before.
        """
        usual, self.objective, self.state.always = self.objective, objective, not modules_known
        self.state.open()
        try:
            return self.run(batch, sizes).loss
        finally:
            self.state.forget(modules=not modules_known)
            self.objective = usual

    def run(self, batch: Batch, sizes: Sequence[int] | None = None) -> Finished:
        plan, attempts = self.batcher.plan(batch, sizes), 0
        while True:
            self.buffer.clear()
            window = batch_losses(self.objective, batch, functools.partial(self._count, batch, plan))
            window.attempts = attempts
            try:
                self._run(batch, window, plan)
                window.check()
                break
            except RestartWindow as restart:
                plan = self.batcher.plan(batch, sizes) if restart.plan in (None, plan) else restart.plan
                attempts = window.attempts
            self.state.restart()
            if self.not_proven is not None:
                self.not_proven(batch)
        self.batcher.close(plan, batch)
        loss, weighs, losses = window.finished()
        if not weighs:
            self.buffer.clear()
            return Finished(loss, weighs, losses)
        total = WindowTotal(self.buffer, window.divisor, rows=batch.rows, outside=self.state.outside)
        run_stages(self.stages, total)
        return Finished(loss, weighs, losses, total.grad_norm)

    def _run(self, batch: Batch, window: BatchLosses, plan: Plan) -> None:
        passes = _BlockPasses(self, window, batch)

        def forward_and_loss(piece: Slice) -> None:
            if self.proving:  # which takes fewer rows where these don't fit
                passes.both(piece)
            else:
                self.oom.run([piece], plan, passes)

        self.buffers.open()
        with self.batch_norm.window(looks=self.state.looks):
            self.layers.run(plan, forward_and_loss, self.oom, window, proving=self.proving)
        if self.state.surprised():
            raise RestartWindow
        self.buffers.move()

    def _count(self, batch: Batch, plan: Plan) -> list[Terms]:
        """Forward passes that count what several losses divide by, and leave everything as it is."""
        generators = [*all_generators(), *held_generators(self.objective.evaluate, *self.roots)]
        modules = [module for root in self.roots for module in root.modules()]
        with as_found(modules, self.objective.device, generators), torch.no_grad(), no_word_of_missing_gradients():
            return [self.objective.evaluate(self.batcher.take(batch, piece))[1] for piece in plan]  # type: ignore[misc]  # terms


class _BlockPasses(Passes):
    """A micro-batch's forward pass, and the backward pass of its loss as far as blocks let it."""

    def __init__(self, runner: BlockRunner, window: BatchLosses, batch: Batch) -> None:
        self._runner, self._layers, self._window, self._batch = runner, runner.layers, window, batch
        window.waits = runner.state.always

    def take(self, piece: Slice) -> Batch:
        return self._runner.batcher.take(self._batch, piece)

    def forward(self, piece: Slice) -> WeightedLoss:
        take, evaluate = functools.partial(self.take, piece), self._window.objective.evaluate
        try:
            with self._runner.batch_norm.micro_batch(), self._layers.micro_batch(take, evaluate):
                return self._window.forward(take())
        except ValueError as error:
            if piece.size == 1 and "more than 1 value per channel" in str(error):  # torch.nn.functional's
                raise OneRow(_ONE_ROW.format(error=error)) from error
            raise

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        retains = any(self._layers.shares(loss) for loss, _, _ in weighted.ends)
        self._window.backward(weighted, retain_graph=retains)
        state = self._runner.state
        if weighted.ran and not state.idle:  # blocks run again later, from the buffers that they have found
            self._runner.buffers.micro_batch(state.moved(), piece.size)
        self._layers.commit(piece)
