"""A window: from one snapshot of the state and a large batch to its finished gradient, over and over until it fits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Plan, Rows
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow
from gradaccum.on_torch.random_state import all_generators
from gradaccum.on_torch.stages import Stage, WindowTotal, run_stages
from gradaccum.on_torch.state import WindowState, as_found
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.distributed import SingleRank, run_by_blocks, run_together
from gradaccum.torch.layers import Layers
from gradaccum.torch.loss import Objective, Terms
from gradaccum.torch.train_step.exact_batch_norm import WholeBatch, run_at_once
from gradaccum.torch.train_step.global_batch import GlobalBatch, Window, inside
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.passes import CountingPasses, TrainPasses

__all__ = ["Finished", "Shared", "WindowRunner"]


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

    modules: list[nn.Module]
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

    def parts(self) -> list[nn.Module]:
        """All modules."""
        return [module for root in self.modules for module in root.modules()]

    def as_found(self) -> contextlib.AbstractContextManager[None]:
        """Leave buffers and generators as they are now."""
        generators = [*all_generators(), *held_generators(*self.functions, *self.modules)]
        return as_found(self.parts(), self.device, generators)


class WindowRunner:
    """Runs large batches in micro-batches, and leaves their finished gradients in `p.grad`."""

    def __init__(
        self,
        shared: Shared,
        objective: Objective,
        ranks: SingleRank,
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

    @functools.cached_property
    def plain(self) -> Objective:
        """The loss on the model that DistributedDataParallel replicates."""
        return self.objective.on(inside(self.objective.model))

    def scale(self) -> float | Tensor:
        """What the scaler multiplies with, on its device."""
        if self.scaler is None:
            return 1.0
        return self.scaler.scale(torch.ones((), dtype=torch.float64, device=self.shared.buffer.parameters()[0].device))

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
                plan = restart.plan if restart.plan is not None and restart.plan is not plan else None
            self.state.restart()
            if self._not_proven is not None:
                self._not_proven(batch)
            self.clear()
            count = functools.partial(self._count, batch, sizes, False)
            window = self._global_batch.anew(window, self.objective, batch, count)
        return self._finish(batch, window, plan)

    def _finish(self, batch: Batch, window: Window, plan: Plan) -> Finished:
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

    def clear(self) -> None:
        """Empty the sum of gradients: a window begins, or has failed."""
        self.shared.buffer.clear()
        if self.noise is not None:
            self.noise.restart()
        if self.ranks.is_distributed:
            self.ranks.clear()
            self.ranks.expect(closes=False, steps=1)

    def _run(self, batch: Batch, window: Window, plan: Plan) -> None:
        """Run all micro-batches of a batch."""
        shared, passes, oom = self.shared, TrainPasses(self, window, batch), self.shared.oom
        self.buffers.open()
        with shared.batch_norm.window():
            if shared.layers is not None and (batch.rows or self.ranks.sharded):
                self._by_blocks(plan, passes)
            elif self.ranks.sharded or shared.all_at_once:
                self._together(batch, plan, passes)
            else:
                if not self.proving:
                    oom.run_all(plan, passes)
                for piece in plan if self.proving else ():  # which takes fewer rows where these don't fit
                    oom.once(piece, plan, passes)
        if not self.state.looks and self.state.surprised():
            raise RestartWindow
        self.buffers.move()

    def _by_blocks(self, plan: Plan, passes: TrainPasses) -> None:
        layers, oom = self.shared.layers, self.shared.oom
        assert layers is not None
        run = oom.once if self.ranks.sharded or self.proving else oom.run
        once = functools.partial(run, plan=plan, passes=passes)
        losses = self._global_batch.of_all_ranks(passes.window)
        turns = functools.partial(layers.run, plan, once, oom.meter, losses, proving=self.proving)
        run_by_blocks(self.ranks, layers.ranks, oom, plan, turns)

    def _together(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        """Where all rows, or all ranks, meet in each pass."""
        shared, at_once = self.shared, None
        if shared.all_at_once and isinstance(plan, Rows) and batch.rows:
            assert shared.whole is not None
            at_once = functools.partial(run_at_once, shared.whole, batch.rows, plan, passes, shared.oom)
        if self.ranks.sharded:
            run_together(self.ranks, shared.oom, plan, passes, batch.rows, shared.batcher.least, at_once)
        elif at_once is not None:
            at_once()

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
        passes = CountingPasses(self, batch)
        while True:
            try:
                with shared.as_found(), shared.batch_norm.window():
                    return passes.run(plan)
            except RestartWindow as restart:
                plan = plan if restart.plan is None else restart.plan
