"""A window: a large batch is cut into micro-batches, which run until they fit, and its finished gradient is left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradaccum.core.sizes import Plan
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import WindowTotal
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow
from gradaccum.on_torch.random_state import all_generators
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.stages import run_stages
from gradaccum.on_torch.state import WindowState, as_found
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.loss import BatchLosses, Objective, Terms, Weight, batch_losses
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.passes import TrainPasses
from gradaccum.torch.train_step.update import Update


@dataclasses.dataclass(slots=True)
class Finished:
    """What a window leaves beside the gradients in `p.grad`."""

    loss: Tensor  # the large batch's, of all ranks' rows
    weighs: bool  # whether any row of the batch weighs something: if not, no gradient is left
    losses: dict[Any, Tensor]  # of several losses, the mean of each
    grad_norm: Tensor | None = None


class WindowRunner:
    """Runs large batches in micro-batches on one device, and leaves their finished gradients in `p.grad`.

    A feature is a subclass that overrides some of the methods from `clear` to `close`, and calls those of `super`.
    `features.py` composes the classes that a step needs, once.

    Args:
        passes: The class of forward and backward passes.
        always: All buffers are looked at in every window, and no window starts over by itself.
    """

    not_proven: Callable[[Batch], None] | None = None
    """Called where a window begins again, as what is known by then may make another proof due."""

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        update: Update,
        batcher: MicroBatcher,
        *,
        batch_norm: BatchNormPolicy,
        oom: OomRetry,
        passes: type[TrainPasses] = TrainPasses,
        always: bool = False,
    ) -> None:
        self.objective, self.batcher, self.batch_norm, self.oom = objective, batcher, batch_norm, oom
        self.buffer, self.stages, self.scaler = update.buffer, update.stages, update.scaler
        self.passes = passes
        self.roots = [model, *(module for prefix, module in objective.modules.items() if prefix)]
        """The model, and what the loss has of modules."""
        self.state, self.buffers = (
            WindowState(
                self.roots,
                objective.device,
                parameters=update.parameters,
                functions=[objective.evaluate],
                always=always,
            ),
            WindowBuffers(),
        )

    def run(self, batch: Batch, sizes: Sequence[int] | None = None) -> Finished:
        self.clear()
        plan: Plan | None = None
        window = self.open(batch, functools.partial(self.count, batch, sizes, True))
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
            window = self.reopen(window, batch, functools.partial(self.count, batch, sizes, False))
        loss, weighs, losses, divisor = self.close(window)
        finished = Finished(loss, weighs, losses)
        if not weighs:
            self.buffer.clear()
        elif divisor is not None or len(self.stages) > 1:  # there is more to do than to divide by 1
            total = self.total(window, divisor, batch)
            run_stages(self.stages, total)
            finished.grad_norm = total.grad_norm
        self.batcher.close(plan, batch)
        return finished

    def _run(self, batch: Batch, window: BatchLosses, plan: Plan) -> None:
        passes = self.passes(self, window, batch)
        self.buffers.open()
        with self.batch_norm.window(looks=self.state.looks):
            self.run_passes(batch, plan, passes)
        if self.state.surprised():
            raise RestartWindow
        self.buffers.move()

    def state_dict(self) -> dict[str, Any]:
        """What windows to come follow from beside parameters and optimizer state: here nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, and whatever is beside it."""

    # What features override.

    def clear(self) -> None:
        """Empty the sum of gradients: a window begins, or has failed."""
        self.buffer.clear()

    def open(self, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        """The losses of a window that begins; `count` counts what several of them divide by."""
        return batch_losses(self.objective, batch, count)

    def reopen(self, window: BatchLosses, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        """The losses of a window that begins once more."""
        new = self.open(batch, count)
        new.attempts = window.attempts
        return new

    def count(self, batch: Batch, sizes: Sequence[int] | None, first: bool) -> list[Terms] | None:
        """What several losses divide by, counted; None where the micro-batches' own passes tell in time."""
        plan = self.batcher.without_measuring(batch, sizes)
        return None if first and len(list(plan)) == 1 else self.counted(batch, plan)

    def counted(self, batch: Batch, plan: Plan) -> list[Terms] | None:
        """By forward passes alone, which leave random numbers and buffers as they are."""
        from gradaccum.torch.loss.counting import CountingPasses

        while True:
            try:
                with self.as_found(), self.batch_norm.window():
                    return CountingPasses(self, batch).run(plan)
            except RestartWindow as restart:
                plan = plan if restart.plan is None else restart.plan

    def run_passes(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        self.oom.run(plan, plan, passes)

    def total(self, window: BatchLosses, divisor: Weight | None, batch: Batch) -> WindowTotal:
        """What the stages take."""
        return WindowTotal(self.buffer, divisor, rows=batch.rows, outside=self.state.outside)

    def close(self, window: BatchLosses) -> tuple[Tensor, bool, dict[Hashable, Tensor], Weight | None]:
        """The large batch's loss; whether anything weighs; several losses; what the gradients are divided by."""
        return *window.finished(), window.divisor

    # What proofs and counting passes ask.

    def alone(self) -> Objective:
        """The objective, of a model that doesn't join this rank with others."""
        return self.objective

    def rows_of_all(self, batch: Batch) -> int:
        """Rows of the large batch, on all ranks."""
        return batch.rows

    def modules(self) -> list[nn.Module]:
        return [module for root in self.roots for module in root.modules()]

    def as_found(self) -> contextlib.AbstractContextManager[None]:
        """Leave buffers and generators as they are now."""
        generators = [*all_generators(), *held_generators(self.objective.evaluate, *self.roots)]
        return as_found(self.modules(), self.objective.device, generators)
