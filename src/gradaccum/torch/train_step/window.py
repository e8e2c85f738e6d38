"""A window: a large batch is cut into micro-batches, which run until they fit, and its finished gradient is left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Plan, Rows, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.oom_retry import OneRow, OomRetry, RestartWindow
from gradaccum.on_torch.random_state import all_generators, held_generators
from gradaccum.on_torch.stages import Stage, WindowTotal, run_stages
from gradaccum.on_torch.state import Snapshot, WindowState, as_found
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.distributed import Ranks, run_by_blocks, run_together
from gradaccum.torch.layers import Layers
from gradaccum.torch.loss import MIXED_TERMS, Objective, Term, Terms, WeightedLoss
from gradaccum.torch.train_step.exact_batch_norm import WholeBatch, run_at_once
from gradaccum.torch.train_step.global_batch import GlobalBatch, Window, inside
from gradaccum.torch.train_step.micro_batcher import MicroBatcher

__all__ = ["Finished", "Shared", "WindowRunner"]

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


@dataclasses.dataclass(slots=True)
class Finished:
    """What a window leaves beside the gradients in `p.grad`."""

    loss: Tensor
    """Of all ranks' rows."""
    weighs: bool
    """Whether any row of the batch weighs something: if not, no gradient is left."""
    losses: dict[Any, Tensor]
    """Of several losses, the mean of each."""
    grad_norm: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the windows of updates and those of proofs have in common."""

    roots: list[nn.Module]
    """The model, and what the loss has of modules."""
    functions: list[Any]
    """What else may hold generators."""
    device: torch.device
    batcher: MicroBatcher
    buffer: GradientBuffer
    batch_norm: BatchNormPolicy
    oom: OomRetry
    layers: Layers | None = None
    whole: WholeBatch | None = None

    @property
    def all_at_once(self) -> bool:
        """Whether the loss is to see all rows together, since BatchNorm layers do."""
        return self.whole is not None and self.whole.needed

    def modules(self) -> list[nn.Module]:
        """All of them."""
        return [module for root in self.roots for module in root.modules()]

    def as_found(self) -> contextlib.AbstractContextManager[None]:
        """Leave buffers and generators as they are now."""
        generators = [*all_generators(), *held_generators(*self.functions, *self.roots)]
        return as_found(self.modules(), self.device, generators)


class WindowRunner:
    """Runs large batches in micro-batches, and leaves their finished gradients in `p.grad`."""

    def __init__(
        self,
        shared: Shared,
        objective: Objective,
        ranks: Ranks,
        state: WindowState,
        *,
        stages: Sequence[Stage],
        scaler: Any = None,
        noise: NoiseMeter | None = None,
        proving: bool = False,
        not_proven: Callable[[Batch], None] | None = None,
    ) -> None:
        self.shared, self.objective, self.ranks, self.state = shared, objective, ranks, state
        self.scaler, self.noise, self.proving = scaler, noise, proving
        self.buffers = WindowBuffers()
        self._stages, self._not_proven = stages, not_proven
        self._global_batch = GlobalBatch(ranks, shared.buffer, in_blocks=shared.layers is not None)

    def scale(self) -> float | Tensor:
        """What the scaler multiplies with, on its device."""
        if self.scaler is None:
            return 1.0
        return self.scaler.scale(torch.ones((), dtype=torch.float64, device=self.shared.buffer.parameters()[0].device))

    def clear(self) -> None:
        """Empty the sum of gradients: a window begins, or has failed."""
        self.shared.buffer.clear()
        if self.noise is not None:
            self.noise.restart()
        if self.ranks.is_distributed:
            self.ranks.engine.clear()
            self.ranks.expect(closes=False, steps=1)

    def run(self, batch: Batch, sizes: Sequence[int] | None = None) -> Finished:
        """Leave the finished gradients of a batch in `p.grad`, as the optimizers get them."""
        self.clear()
        plan: Plan | None = None
        window = self._global_batch.open(self.objective, batch, lambda: self._count(batch, sizes, True))
        while True:
            try:
                plan = self.shared.batcher.plan(batch, sizes) if plan is None else plan
                self._run(batch, window, plan)
                window.check()
                break
            except RestartWindow as restart:
                plan = restart.plan if restart.plan is not plan else None
            self.state.restart()
            if self._not_proven is not None:
                self._not_proven(batch)
            self.clear()
            again = functools.partial(self._count, batch, sizes, False)
            window = self._global_batch.reopen(window, self.objective, batch, again)
        loss, divisor, weighs = self._global_batch.close(window, self.state)
        finished = Finished(loss, weighs, window.losses)
        if weighs:
            total = WindowTotal(self.shared.buffer, divisor, rows=batch.rows, outside=self.state.outside)
            if self.noise is not None:
                total.rows = round(self.ranks.sum_number(batch.rows))
                total.multiple = self.scale() * (1.0 if window.is_mean else float(total.rows))
            run_stages(self._stages, total)
            finished.grad_norm = total.grad_norm
        self.shared.batcher.close(plan, batch)
        return finished

    def _run(self, batch: Batch, window: Window, plan: Plan) -> None:
        """Run all micro-batches of a batch."""
        shared, ranks, oom, layers = self.shared, self.ranks, self.shared.oom, self.shared.layers
        passes = TrainPasses(self, window, batch)
        self.buffers.open()
        with shared.batch_norm.window():
            if layers is not None and (batch.rows or ranks.sharded):
                losses, fits = self._global_batch.of_all_ranks(window), ranks.sharded or self.proving

                def forward_and_loss(piece: Slice) -> None:
                    oom.once(piece, plan, passes) if fits else oom.run([piece], plan, passes)

                turns = functools.partial(layers.run, plan, forward_and_loss, oom.meter, losses, proving=self.proving)
                run_by_blocks(ranks, layers.ranks, oom, plan, turns)
            elif ranks.sharded or shared.all_at_once:  # all ranks, or all rows, meet in each pass
                at_once = None
                if shared.whole is not None and shared.whole.needed and isinstance(plan, Rows) and batch.rows:
                    at_once = functools.partial(run_at_once, shared.whole, batch.rows, plan, passes, oom)
                if ranks.sharded:
                    run_together(ranks, oom, plan, passes, batch.rows, shared.batcher.least, at_once)
                elif at_once is not None:
                    at_once()
            elif self.proving:  # which takes fewer rows where these don't fit
                for piece in plan:
                    oom.once(piece, plan, passes)
            else:
                oom.run(plan, plan, passes)
        if self.state.surprised():
            raise RestartWindow
        self.buffers.move()

    def _count(self, batch: Batch, sizes: Sequence[int] | None, first: bool) -> list[Terms] | None:
        """What several losses divide by, counted; None where the micro-batches' own passes tell in time.

        Forward passes alone: random numbers and buffers stay as they are.
        """
        shared, several = self.shared, self.ranks.is_distributed
        if several and (shared.all_at_once or self.state.always):
            return None  # it would have to run on all ranks at once
        plan = shared.batcher.without_measuring(batch, sizes)
        if not several and (shared.all_at_once or (first and len(list(plan)) == 1)):
            return None
        while True:
            try:
                with shared.as_found(), shared.batch_norm.window():
                    return CountingPasses(self, batch).run(plan)
            except RestartWindow as restart:
                plan = plan if restart.plan is None else restart.plan


class TrainPasses:
    """The forward and the backward pass of each micro-batch of one batch."""

    def __init__(self, runner: WindowRunner, window: Window, batch: Batch) -> None:
        shared = runner.shared
        self.window, self._runner, self._batch, self._rows = window, runner, batch, batch.rows
        self._batcher, self._norm, self._layers = shared.batcher, shared.batch_norm, shared.layers
        self._scaler, self._noise = runner.scaler, runner.noise
        self._moves = not runner.state.idle  # while a window runs, that stays so
        window.skips = not self._moves and self._norm.idle

    def take(self, piece: Slice) -> Batch:
        """The micro-batch of a slice."""
        return self._batcher.take(self._batch, piece)

    def forward(self, piece: Slice) -> WeightedLoss:
        """The forward pass of a slice."""
        rows = piece.rows
        micro_batch = self._batch.take(rows) if type(rows) is slice else self.take(piece)
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
        elif layers is None and self._runner.ranks.sharded:
            if weighted.weightless is None:
                self.idle(self.take(piece))
            else:
                self._backward_of_nothing(weighted.weightless)
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
        shared = self._runner.shared
        with shared.oom.around(), shared.as_found():
            try:
                loss = self.window.objective.forward(micro_batch)[0]
            except (RuntimeError, ValueError, IndexError) as error:
                if micro_batch.rows or is_out_of_memory(error) or isinstance(error, WindowError):
                    raise
                raise ValueError(_NO_ROWS.format(error=error)) from error
            self._backward_of_nothing(loss)

    def _backward_of_nothing(self, loss: Tensor) -> None:
        ranks = self._runner.ranks
        ranks.engine.scale(0.0, idle=True)
        try:
            loss.backward()
        finally:
            ranks.engine.scale(1.0)


class CountingPasses:
    """Forward passes that find out what the terms of a loss weigh, before the passes that count.

    Without gradients, unless the loss needs some of its own, as a gradient penalty does.
    """

    def __init__(self, runner: WindowRunner, batch: Batch) -> None:
        self._shared, self._batch = runner.shared, batch
        self._objective = runner.objective.on(inside(runner.objective.model))
        self._found: list[Terms] = []

    def run(self, plan: Plan) -> list[Terms]:
        """The terms of each micro-batch, without graphs; nothing where the loss turns out to be a single one."""
        for piece in plan:
            buffers = Snapshot.of(self._shared.modules())  # each of them finds what the first one does
            self._shared.oom.run([piece], plan, self)
            buffers.put_back()
            if not self._objective.found.terms:
                break
        return self._found

    def forward(self, piece: Slice) -> Terms | None:
        """The forward pass of a slice. Returns its terms; None where the loss is a single one."""
        found = self._objective.found
        with self._shared.batch_norm.micro_batch():
            if not found.needs_gradients:
                try:
                    return self._terms(piece, False)
                except RuntimeError as error:
                    if is_out_of_memory(error) or "does not require grad" not in str(error):
                        raise
                    found.needs_gradients = True
            return self._terms(piece, True)

    def _terms(self, piece: Slice, gradients: bool) -> Terms | None:
        with torch.set_grad_enabled(gradients):
            _, terms = self._objective.evaluate(self._shared.batcher.take(self._batch, piece))
        if isinstance(terms, dict):
            return {name: Term(term.loss.detach(), term.weight) for name, term in terms.items()}
        if self._found:
            raise ValueError(MIXED_TERMS)
        return None

    def backward(self, piece: Slice, terms: Terms | None) -> None:
        """There is none: the slice is counted."""
        if terms is not None:
            self._found.append(terms)
