"""A window: a large batch is cut into micro-batches, which run until they fit, and its finished gradient is left."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradaccum.core.sizes import Plan, Rows, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.on_torch.grad_buffer import WindowTotal
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.oom_retry import OneRow, OomRetry, Passes, RestartWindow, nothing_fits
from gradaccum.on_torch.random_state import all_generators
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.stages import gradient_stages, run_stages
from gradaccum.on_torch.state import Snapshot, WindowState, as_found
from gradaccum.torch.batch_norm import BatchNormPolicy, batch_norms
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.chunking import chunked
from gradaccum.torch.chunking.two_passes import no_word_of_missing_gradients
from gradaccum.torch.distributed import Ranks, run_together
from gradaccum.torch.loss import MIXED_TERMS, BatchLosses, Objective, Term, Terms, WeightedLoss
from gradaccum.torch.train_step.global_batch import GlobalBatch, inside
from gradaccum.torch.train_step.micro_batcher import EXACT_MICRO_BATCH_SIZE, MicroBatcher
from gradaccum.torch.train_step.update import Update

logger = logging.getLogger("gradaccum")

_NO_CONTEXT = contextlib.nullcontext()

_ONE_ROW = (
    'BatchNorm can\'t normalise a micro-batch of one row by itself: {error}. Use batch_norm="exact", which normalises '
    "over the whole batch, or a `micro_batch_size` that leaves no single row: 2 for an even number of rows, 3 or more "
    "for any. A batch of one row has nothing to normalise over at all."
)
_NO_ROWS = (
    "This rank has no rows for a pass that the other ranks of a sharded model run, and the model or the loss can't run "
    "on 0 rows: {error}. Give each rank at least as many rows as there are micro-batches, or write sizes out: "
    "x.view(-1, width) works on 0 rows, x.view(len(x), -1) doesn't."
)
_NOT_REACHED = (
    "Out of memory in the forward pass of a micro-batch of %d rows with weight 0. Parameters that only such rows use "
    "have no gradient now, and sparse gradients lack such rows, where the large batch has zeros. So weight decay "
    "and momentum don't move them."
)


@dataclasses.dataclass(slots=True)
class Finished:
    """What a window leaves beside the gradients in `p.grad`."""

    loss: Tensor  # of all ranks' rows
    weighs: bool  # whether any row of the batch weighs something: if not, no gradient is left
    losses: dict[Any, Tensor]  # of several losses, the mean of each
    grad_norm: Tensor | None = None


class WindowRunner:
    """Runs large batches in micro-batches, and leaves their finished gradients in `p.grad`."""

    proving = False
    not_proven: Callable[[Batch], None] | None = None
    """Called where a window begins again, as what is known by then may make another proof due."""

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        ranks: Ranks,
        update: Update,
        batcher: MicroBatcher,
        *,
        batch_norm: BatchNormPolicy,
        oom: OomRetry,
        whole: WholeBatch | None,
        always: bool,
    ) -> None:
        self.objective, self.ranks, self.batcher, self.batch_norm, self.oom = objective, ranks, batcher, batch_norm, oom
        self.whole = whole
        self.buffer, self.stages, self.scaler, self.noise = update.buffer, update.stages, update.scaler, update.noise
        self.roots = [model, *(module for prefix, module in objective.modules.items() if prefix)]
        """The model, and what the loss has of modules."""
        self._staged = len(self.stages) > 1  # whether there is more to do with the gradients than to divide them
        self._new_state = functools.partial(
            WindowState,
            self.roots,
            objective.device,
            parameters=update.parameters,
            functions=[objective.evaluate],
        )
        self.state, self.buffers = self._new_state(always=always), WindowBuffers()
        self._global_batch = GlobalBatch(ranks, self.buffer)

    def rehearse(
        self, objective: Objective, batch: Batch, sizes: Sequence[int], scaler: Any, *, known: bool = False
    ) -> Tensor:
        """What a window does, by this rank alone: nothing is clipped, measured or learned. Returns the loss.

        `known`: which modules there are has been looked up for the proof before.
        """
        own = self._alone
        own.objective = objective.on(inside(self.roots[0]) if self.whole is None else self.whole.chunks)
        own.scaler, own.state.always = scaler, not known
        own.state.open()
        try:
            return own.run(batch, sizes).loss
        finally:
            own.state.forget(modules=not known)
            own.objective = self.objective

    @functools.cached_property
    def _alone(self) -> WindowRunner:
        """The runner of proofs."""
        own = copy.copy(self)
        own.ranks, own.state, own.buffers = Ranks(), self._new_state(always=True), WindowBuffers()
        own.noise, own.not_proven, own.proving = None, None, True
        own.stages = gradient_stages({"accumulate_dtype": self.buffer.dtype})
        own._staged = len(own.stages) > 1
        own._global_batch = GlobalBatch(own.ranks, self.buffer)
        return own

    @property
    def all_at_once(self) -> bool:
        """Whether the loss is to see all rows together, since BatchNorm layers do."""
        return self.whole is not None and self.whole.needed

    def modules(self) -> list[nn.Module]:
        return [module for root in self.roots for module in root.modules()]

    def as_found(self) -> contextlib.AbstractContextManager[None]:
        """Leave buffers and generators as they are now."""
        generators = [*all_generators(), *held_generators(self.objective.evaluate, *self.roots)]
        return as_found(self.modules(), self.objective.device, generators)

    def scale(self) -> float | Tensor:
        if self.scaler is None:
            return 1.0
        return self.scaler.scale(torch.ones((), dtype=torch.float64, device=self.buffer.parameters()[0].device))

    def clear(self) -> None:
        """Empty the sum of gradients: a window begins, or has failed."""
        self.buffer.clear()
        if self.noise is not None:
            self.noise.restart()
        if self.ranks.is_distributed:
            self.ranks.engine.clear()
            self.ranks.expect(closes=False, steps=1)

    def run(self, batch: Batch, sizes: Sequence[int] | None = None) -> Finished:
        self.clear()
        plan: Plan | None = None
        window = self._global_batch.open(self.objective, batch, lambda: self._count(batch, sizes, True))
        while True:
            try:
                plan = self.batcher.plan(batch, sizes) if plan is None else plan
                self._run(batch, window, plan)
                window.check()
                break
            except RestartWindow as restart:
                plan = restart.plan if restart.plan is not plan else None
            self.state.restart()
            if self.not_proven is not None:
                self.not_proven(batch)
            self.clear()
            again = functools.partial(self._count, batch, sizes, False)
            window = self._global_batch.reopen(window, self.objective, batch, again)
        loss, weighs, losses, divisor = self._global_batch.close(window, self.state)
        finished = Finished(loss, weighs, losses)
        if not weighs:
            if not self.ranks.is_distributed:
                self.buffer.clear()  # of the zeros of what weighs nothing
        elif divisor is not None or self._staged:
            total = WindowTotal(self.buffer, divisor, rows=batch.rows, outside=self.state.outside)
            if self.noise is not None:
                total.rows = round(sum(self.ranks.numbers(batch.rows)))
                total.scale, total.multiple = self.scale(), 1.0 if window.is_mean else float(total.rows)
            run_stages(self.stages, total)
            finished.grad_norm = total.grad_norm
        self.batcher.close(plan, batch)
        return finished

    def _run(self, batch: Batch, window: BatchLosses, plan: Plan) -> None:
        norm = self.batch_norm.window(looks=self.state.looks)
        passes = TrainPasses(self, window, batch)
        self.buffers.open()
        with norm:
            if self.ranks.sharded or self.all_at_once:  # all ranks, or all rows, meet in each pass
                self._run_together(batch, plan, passes)
            elif self.proving:  # which takes fewer rows where these don't fit
                for piece in plan:
                    passes.both(piece)
            else:
                self.oom.run(plan, plan, passes)
        if self.state.surprised():
            raise RestartWindow
        self.buffers.move()
        if passes.weightless:
            self._reach(passes)

    def _run_together(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        at_once = None
        if self.whole is not None and self.whole.needed and isinstance(plan, Rows) and batch.rows:
            at_once = functools.partial(self.whole.run, batch.rows, plan, passes, self.oom)
        if self.ranks.sharded:
            run_together(self.ranks, self.oom, plan, passes, batch.rows, self.batcher.least, at_once)
        elif at_once is not None:
            at_once()

    def _reach(self, passes: TrainPasses) -> None:
        """Give a gradient of zero to parameters that only micro-batches of weight 0 lead to: the large batch does."""
        if self.ranks.sharded or (self.ranks.is_distributed and (self.all_at_once or self.state.always)):
            return
        objective = self.objective.on(inside(self.objective.model))
        for piece in passes.weightless:
            if not self.buffer.lacking():
                return
            try:
                with self.as_found(), self.batch_norm.window(), self.batch_norm.micro_batch():
                    self.buffer.reach(*objective.losses(passes.take(piece)), alone=not self.ranks.is_distributed)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                logger.warning(_NOT_REACHED, piece.size)
                return

    def _count(self, batch: Batch, sizes: Sequence[int] | None, first: bool) -> list[Terms] | None:
        """What several losses divide by, counted; None where the micro-batches' own passes tell in time.

        Forward passes alone: random numbers and buffers stay as they are.
        """
        several = self.ranks.is_distributed
        if several and (self.all_at_once or self.state.always):
            return None  # it would have to run on all ranks at once
        plan = self.batcher.without_measuring(batch, sizes)
        if not several and (self.all_at_once or (first and len(list(plan)) == 1)):
            return None
        while True:
            try:
                with self.as_found(), self.batch_norm.window():
                    return CountingPasses(self, batch).run(plan)
            except RestartWindow as restart:
                plan = plan if restart.plan is None else restart.plan


class TrainPasses(Passes):
    """The forward and the backward pass of each micro-batch of one batch."""

    def __init__(self, runner: WindowRunner, window: BatchLosses, batch: Batch) -> None:
        self.window, self._runner, self._batch = window, runner, batch
        self.weightless: list[Slice] = []  # the micro-batches that weigh nothing
        self._norm, self._noise = runner.batch_norm, runner.noise
        self._scale = None if runner.scaler is None else runner.scaler.scale
        self._moves = not runner.state.idle  # while a window runs, that stays so
        self._plain = self._noise is None and self._norm.idle
        window.skips = runner.state.neutral and self._norm.idle
        window.waits = runner.state.always
        self._quick = self._plain and not self._moves and self._scale is None and not runner.ranks.sharded

    def take(self, piece: Slice) -> Batch:
        return self._runner.batcher.take(self._batch, piece)

    def both(self, piece: Slice) -> None:
        if not self._quick:
            self.backward(piece, self.forward(piece))
            return
        rows = piece.rows
        try:
            weighted = self.window.run(self._batch.take(rows) if type(rows) is slice else self.take(piece))
        except ValueError as error:
            self._check_one_row(piece, error)
            raise
        if weighted is not None:
            self.backward(piece, weighted)

    def forward(self, piece: Slice) -> WeightedLoss:
        micro_batch = self.take(piece)
        try:
            if self._plain:
                return self.window.forward(micro_batch)
            with self._norm.micro_batch():
                return self.window.forward(micro_batch, self._noise is not None and self._noise.waiting)
        except ValueError as error:
            self._check_one_row(piece, error)
            raise

    def _check_one_row(self, piece: Slice, error: ValueError) -> None:
        if piece.size == 1 and "more than 1 value per channel" in str(error):  # torch.nn.functional's
            raise OneRow(_ONE_ROW.format(error=error)) from error

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        if weighted.weightless or not weighted.ends:
            self._weighs_nothing(piece, weighted)
        self.window.backward(weighted, self._scale)
        if self._moves and weighted.ran and piece.size < self._batch.rows:
            self._runner.buffers.micro_batch(self._runner.state.moved(), piece.size)
        if self._noise is not None:
            self._note(self._noise, piece, weighted)

    def _weighs_nothing(self, piece: Slice, weighted: WeightedLoss) -> None:
        """The micro-batch, or one of its losses. What that alone leads to has a gradient of zero, as of all rows."""
        losses = weighted.weightless
        if self._runner.ranks.sharded:
            if losses and not weighted.ends:
                self._backward_of_nothing(sum(losses[1:], losses[0]))
            elif not weighted.ends:
                self.idle(self.take(piece))
        elif losses:
            ends = [get_gradient_edge(loss) for loss in losses if loss.requires_grad]
            if self._moves and ends and not weighted.ends:  # checkpoints run again, and move buffers again
                self._runner.buffer.run_on_zeros(ends)
            else:
                others = [loss for loss, _, _ in weighted.ends]
                self._runner.buffer.reach(*losses, others=others, alone=not self._runner.ranks.is_distributed)
        elif not weighted.ran:
            self.weightless.append(piece)

    def _note(self, noise: NoiseMeter, piece: Slice, weighted: WeightedLoss) -> None:
        """Have the noise scale know that this micro-batch counts."""
        if noise.waiting and weighted.ends:
            noise.counts_rows = True
            sums, multiple = self._runner.buffer.gradients(), self.window.multiple(weighted, piece.size)
            noise.micro_batch(sums, piece.size, self._runner.scale() * multiple)

    def idle(self, micro_batch: Batch) -> None:
        """A forward and a backward pass that count nothing: the other ranks of a sharded model wait for them."""
        with self._runner.as_found():
            try:
                loss = self.window.objective.forward(micro_batch)[0]
            except (RuntimeError, ValueError, IndexError) as error:
                if micro_batch.rows or is_out_of_memory(error) or isinstance(error, WindowError):
                    raise
                raise ValueError(_NO_ROWS.format(error=error)) from error
            self._backward_of_nothing(loss)

    def _backward_of_nothing(self, loss: Tensor) -> None:
        engine = self._runner.ranks.engine
        engine.scale(0.0, idle=True)
        try:
            loss.backward()
        finally:
            engine.scale(1.0)


class CountingPasses(Passes):
    """Forward passes that find out what the terms of a loss weigh, before the passes that count.

    Without gradients, unless the loss needs some of its own, as a gradient penalty does.
    """

    def __init__(self, runner: WindowRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self._objective = runner.objective.on(inside(runner.objective.model))
        self._found: list[Terms] = []

    def run(self, plan: Plan) -> list[Terms]:
        for piece in plan:
            buffers = Snapshot.of(self._runner.modules())  # each of them finds what the first one does
            self._runner.oom.run([piece], plan, self)
            buffers.put_back()
            if not self._objective.found.terms:
                break
        return self._found

    def forward(self, piece: Slice) -> Terms | None:
        found = self._objective.found
        with self._runner.batch_norm.micro_batch():
            if not found.needs_gradients:
                try:
                    return self._terms(piece, False)
                except RuntimeError as error:
                    if is_out_of_memory(error) or "does not require grad" not in str(error):
                        raise
                    found.needs_gradients = True
            return self._terms(piece, True)

    def _terms(self, piece: Slice, gradients: bool) -> Terms | None:
        with torch.set_grad_enabled(gradients), no_word_of_missing_gradients():
            _, terms = self._objective.evaluate(self._runner.batcher.take(self._batch, piece))
        if isinstance(terms, dict):
            return {name: Term(term.loss.detach(), term.weight) for name, term in terms.items()}
        if self._found:
            raise ValueError(MIXED_TERMS)
        return None

    def backward(self, piece: Slice, terms: Terms | None) -> None:
        if terms is not None:
            self._found.append(terms)


class WholeBatch:
    """A model that takes the large batch, in micro-batches, with exact BatchNorm."""

    def __init__(self, model: nn.Module, batch_dims: BatchDims, takes_inputs: bool, *, offload: bool = False) -> None:
        self.outer = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self.inner = model if self.outer is None else self.outer.get_submodule("module")
        dims: BatchDims = batch_dims if isinstance(batch_dims, int) else 0
        if takes_inputs and not isinstance(batch_dims, int | None):  # of (x, y), those of x
            dims = (batch_dims[0] if isinstance(batch_dims, (tuple, list)) else batch_dims,)
        self.chunks = chunked(
            self.inner, EXACT_MICRO_BATCH_SIZE, batch_dims=dims, batch_norm="exact", offload=offload, verify=False
        )
        self.model = self.chunks if self.outer is None else self.outer  # what to call on the large batch

    @property
    def needed(self) -> bool:
        """Whether the model looks across rows as it is now."""
        return bool(batch_norms(self.inner))

    @contextlib.contextmanager
    def _in_micro_batches(self, size: int) -> Iterator[None]:
        self.chunks.micro_batch_size = size
        if self.outer is not None:
            self.outer._modules["module"] = self.chunks
        try:
            yield
        finally:
            if self.outer is not None:
                self.outer._modules["module"] = self.inner

    def run(self, rows: int, plan: Rows, passes: TrainPasses, oom: OomRetry) -> None:
        """All rows at once, in smaller micro-batches where these don't fit."""
        size = plan.sizer.next_size(rows)
        try:
            with self._in_micro_batches(size):
                oom.once(Slice(slice(0, rows)), plan, passes)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            smaller = plan.too_large(size) if size > 1 else None
            if smaller is None:
                raise nothing_fits(error) from error
        oom.meter.release()
        logger.warning(
            "Out of memory with micro-batches of %d rows: starting the batch again with %d.", size, smaller.size
        )
        raise RestartWindow(smaller)
