"""Windows whose micro-batches run as compiled programs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradaccum.core.sizes import Plan, Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.oom_retry import RestartWindow
from gradaccum.torch.compiled.program import NotCompilable, Program
from gradaccum.torch.compiled.programs import Programs
from gradaccum.torch.compiled.proof import prove
from gradaccum.torch.loss import BatchLosses, Terms, Totals
from gradaccum.torch.train_step.passes import TrainPasses
from gradaccum.torch.train_step.rehearsal import Rehearsal
from gradaccum.torch.train_step.window import Finished, WindowRunner

logger = logging.getLogger("gradaccum")

_NO_WEIGHT = "a micro-batch weighs nothing, and its loss and gradient may be 0 / 0"


class ProgramRunner(WindowRunner):
    """Runs windows by programs, where there are any."""

    def __init__(self, *arguments: Any, programs: Programs | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._programs = programs
        self.compiled = False
        """Whether all of the last window ran as programs."""
        self._runs_eagerly = ""
        self._reasons: set[str] = set()

    @property
    def programs(self) -> Programs:
        assert self._programs is not None
        return self._programs

    def open(self, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        self.compiled, self._runs_eagerly = True, ""
        return super().open(batch, count)

    def reopen(self, window: BatchLosses, batch: Batch, count: Callable[[], list[Terms] | None]) -> BatchLosses:
        reason = self._runs_eagerly
        window = super().reopen(window, batch, count)
        if reason:
            self.compiled, self._runs_eagerly = False, reason
        return window

    def run_passes(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        assert isinstance(passes, CompiledPasses)
        pieces = [] if plan.measuring else list(plan)
        reason = self._why_eager(passes.window, batch, pieces)
        if reason is None:
            passes.prepare(pieces)
        else:
            self.eager(reason)
        super().run_passes(batch, plan, passes)

    def eager(self, reason: str, *, rare: bool = False) -> None:
        """Note that a part of this window isn't compiled; the first time, say why."""
        self.compiled = False
        if reason not in self._reasons:
            self._reasons.add(reason)
            (logger.info if rare else logger.warning)("Not compiled: %s.", reason)

    def restart_eagerly(self, reason: str) -> None:
        """Begin this window once more, without programs."""
        self._runs_eagerly = reason
        raise RestartWindow

    def _why_eager(self, window: BatchLosses, batch: Batch, pieces: Sequence[Slice]) -> str | None:
        if self.programs.failure is not None:
            return self.programs.failure
        if self._runs_eagerly:
            return self._runs_eagerly
        if self.objective.found.empty:
            return _NO_WEIGHT
        if not pieces:
            return 'micro_batch_size="auto" is still looking for the fastest size'
        if any([leaf.requires_grad for _, leaf, _ in batch.leaves if isinstance(leaf, Tensor)]):
            return "the batch has tensors that require a gradient"
        form = self.programs.form
        if form is None or self.state.looks:
            form = self.programs.prepare(window, self.batcher.take(batch, pieces[0]))
        return form.problem


class CompiledRunner(ProgramRunner):
    """Runs large batches as compiled programs: the whole window where it is short, else each micro-batch.

    A window, or a micro-batch, for which there is no program runs as `WindowRunner` runs it.

    Args:
        keywords: `torch.compile`'s.
        verify: Compare compiled windows with eager ones.
        eager_passes: The class of passes without programs.
    """

    def __init__(
        self,
        *arguments: Any,
        keywords: Mapping[str, Any],
        verify: bool,
        eager_passes: type[TrainPasses],
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._programs, self._verify = Programs(self, keywords, self.eager), verify
        self._proven = False

        @functools.cache
        def rehearsal(compiled: bool) -> Rehearsal:
            kind, more = (_CompiledRehearsal, {"programs": self.programs}) if compiled else (Rehearsal, {})
            own = {**named, **more, "passes": self.passes if compiled else eager_passes, "always": True}
            return kind(*arguments, alone=self.roots[0], **own)

        self._rehearsal = rehearsal

    def run(self, batch: Batch, sizes: Sequence[int] | None = None) -> Finished:
        self.programs.renew()
        if self._verify and self.state.looks and not self.programs.failure:
            self._prove(batch)
        finished = super().run(batch, sizes)
        if self.programs.unproven:  # a program that is new in this window
            if self._verify:
                self.state.restart()
                self._prove(batch)
                finished = super().run(batch, sizes)
            self.programs.unproven = False
        return finished

    def _prove(self, batch: Batch) -> None:
        self.programs.rehearses = True
        try:
            prove(self, batch, self.rehearse, repeated=self._proven and not self.programs.unproven)
        finally:
            self.programs.rehearses = False
        self._proven, self.programs.unproven = True, False
        self.state.retake()

    def rehearse(self, batch: Batch, compiled: bool) -> Tensor:
        """Leave the finished gradient of a batch, not clipped, from compiled or from eager passes. Returns its loss."""
        return self._rehearsal(compiled).rehearse(self.objective, batch, None, self.scaler)


class _CompiledRehearsal(ProgramRunner, Rehearsal):
    """The windows of proofs, compiled."""

    def eager(self, reason: str, *, rare: bool = False) -> None:
        """The window that is proven says so."""


class CompiledPasses(TrainPasses):
    """The micro-batches of one batch, each by a program, or all by one."""

    def __init__(self, runner: Any, window: BatchLosses, batch: Batch) -> None:
        super().__init__(runner, window, batch)
        self._programs: Programs = runner.programs
        self._parameters: list[Tensor] = []
        self._pieces: Sequence[Slice] = ()
        self._at_once = False
        self._waiting: list[Slice] = []
        self._sums: list[Tensor] | None = None

    def prepare(self, pieces: Sequence[Slice]) -> None:
        """These micro-batches may run as programs."""
        self._pieces, self._parameters = pieces, self._programs.parameters()
        self._at_once = self._programs.at_once(self.batch, pieces)

    def both(self, piece: Slice) -> None:
        if not self._pieces:
            super().both(piece)
            return
        if not self._at_once:
            self._run([piece])
            return
        self._waiting.append(piece)
        if len(self._waiting) == len(self._pieces):
            waiting, self._waiting = self._waiting, []
            self._run(waiting)

    def _run(self, pieces: Sequence[Slice]) -> None:
        programs = self._programs
        cut_inside = self._at_once and programs.cuts(self.batch)
        if cut_inside:
            micro_batches = [Batch(self.batch.tree, self.batch.batch_dims, piece.size) for piece in pieces]
        else:
            micro_batches = [self.take(piece) for piece in pieces]
        for _ in pieces:
            self._norm.micro_batch()  # warns of BatchNorm layers
        known = programs.factors(self.window, micro_batches)
        program = programs.find(self.window, self.batch, micro_batches) if known is not None else None
        if known is None or program is None:
            self._run_eagerly(pieces)
            return
        weights, factors = known
        trees = self.batch.tree if cut_inside else [micro_batch.tree for micro_batch in micro_batches]
        starts = programs.tensors(factors[:1] if cut_inside else factors, self.scale)
        try:
            losses, told = self._add(program, trees, starts)
        except NotCompilable as error:
            self._not_compilable(program, pieces, error)
            raise
        for micro_batch, weight, found, each in zip(micro_batches, weights, losses, told):
            self._count(micro_batch.rows, weight, found, each)
        if self._moves:
            self._note_moves(pieces)

    def _run_eagerly(self, pieces: Sequence[Slice]) -> None:
        for piece in pieces:
            super().both(piece)
        self._sums = None  # others may be in `p.grad` now

    def _not_compilable(self, program: Program, pieces: Sequence[Slice], error: NotCompilable) -> None:
        """Begin the window again in another way, if there is one."""
        if program.ran:
            self._programs.failure = f"a program can't be compiled once more, as it has to be by now. {error}"
            self.runner.restart_eagerly(self._programs.failure)
        if len(pieces) > 1:  # checkpoints, for one, can be recomputed in one backward pass alone
            self._programs.each_apart()
            raise RestartWindow from None

    def _add(
        self, program: Program, trees: Sequence[Any], starts: Sequence[Sequence[Tensor]]
    ) -> tuple[Sequence[Sequence[Tensor]], Sequence[Sequence[Any]]]:
        """Run a program. Returns the losses of each micro-batch, and the weights that they came with."""
        if not self._at_once and self._sums is None:
            self._sums = self._new_sums()
        losses, weights, reached, new = self._programs.call(program, self._parameters, trees, starts, self._sums)
        for parameter, gradient, is_reached in zip(self._parameters, new or self._sums or (), reached):
            if is_reached:
                parameter.grad = gradient
        return losses, weights

    def _new_sums(self) -> list[Tensor]:
        new = self._programs.zeros(self._parameters)
        return [zeros if p.grad is None else p.grad for p, zeros in zip(self._parameters, new)]

    def _count(self, rows: int, known: Totals | None, losses: Sequence[Tensor], weights: Sequence[Any]) -> None:
        weighted = self.window.weigh(*self._programs.told(losses, weights), known, rows)
        if weighted.weightless:  # its gradient, which may be 0 / 0, is in the sum
            self.runner.restart_eagerly(_NO_WEIGHT)
        self.window.count(weighted)

    def _note_moves(self, pieces: Sequence[Slice]) -> None:
        moved = self.runner.state.moved()
        if moved and len(pieces) > 1:  # each micro-batch should have found what the first one did
            self._programs.each_apart()
            raise RestartWindow
        if pieces[0].size < self.batch.rows:
            self.runner.buffers.micro_batch(moved, pieces[0].size)
