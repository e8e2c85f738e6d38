"""Data parallel training on several ranks: one message and one reduction of the gradients per window.

Each rank sums its micro-batches in `p.grad`, in multiples of a unit that all ranks share; the model's own reduction
turns the sums into their mean over the ranks; dividing that gives the mean over all rows of all ranks:

    S_r = sum_i (w_ri / unit) g_ri      A = sum_r S_r / ranks      gradient = A / (W / (unit * ranks)),  W = sum w_ri

So ranks need not have the same rows, weights or numbers of micro-batches. The unit is the largest weight of a
micro-batch, so what is reduced is of the gradients' own size.

A window's message says that this rank comes to the reduction, and what its part of the window weighs:

    backward()   DDP: WINDOW is sent at the first gradient, and travels while the pass and DDP's reduction go on
    step()       WINDOW is read; it is sent only here where no backward pass reduces, and the sum is reduced then
    step()       TOTAL, only where a WINDOW could not say the weight: a GradScaler's verdict comes after the pass

A rank without a micro-batch sends its WINDOW with weight 0 at the end of its epoch, and joins the reduction if another
rank has one; the epoch is over when none has. torch's `Join` would need a blocking reduction per micro-batch for that.
Every rank that has sent a WINDOW reduces, and looks only afterwards whether the ranks' windows go together: so none
waits in a reduction for one that has raised. A sharded model's ranks meet in each of its collectives, so its message
comes after the last backward pass.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import after_backward
from gradaccum.torch.distributed.channel import Channel
from gradaccum.torch.distributed.engine import Engine
from gradaccum.torch.distributed.fsdp import DIFFERENT_PASSES
from gradaccum.torch.distributed.messages import Kind, Messages, Report, Reports, Total
from gradaccum.torch.distributed.settings import Settings, by_rank

logger = logging.getLogger("gradaccum")


_FEWER = (
    "A sharded model needs the same number of batches on every rank. Whether the epoch is over: {}. Nothing was "
    "updated. Pad or drop batches (DistributedSampler does), or use TrainStep or DistributedDataParallel, which take "
    "different numbers."
)


class Closed(NamedTuple):
    """A window that all ranks have closed."""

    total: Total
    unit: float
    """What the sum is a multiple of."""
    buffers_from: int | None
    """The first rank whose micro-batches have run; None where they have on all ranks, or on none."""
    sums: Sequence[float]
    """What the numbers that went along add up to."""


@dataclasses.dataclass(slots=True)
class _MicroBatch:
    """What has happened in a micro-batch, of a window that closes with it or not."""

    closes: bool = False
    steps: int = 0
    reports: Reports | None = None  # of all ranks, about the window that closes
    share: Total | None = None  # what this rank's has said that it weighs
    adopted: bool = False  # whether the listener knows the ranks' loss scale
    reducing: bool = False  # whether a backward pass has begun that reduces
    versions: list[tuple[int, int]] | None = None  # of the gradients, when a backward pass had reduced them


class Listener:
    """What an optimizer's window does while its ranks run a micro-batch; on a single device it is never called."""

    def forward_starts(self, loss_scale: float) -> None:
        """A forward pass of the micro-batch that closes the window; the ranks agreed on this loss scale."""

    def pass_begins(self) -> None:
        """A backward pass of that micro-batch is about to bring gradients."""

    def backward_starts(self) -> None:
        """A backward pass starts: any of a sharded model, else one that reduces."""

    def share(self) -> Total | None:
        """What `total` will be called with after the backward pass that starts; None: only that pass will tell."""

    def own_unit(self) -> float:
        """What the gradients that are about to arrive are multiples of; 0: they weigh nothing."""
        return 0.0

    def take_unit(self, unit: float) -> float:
        """They are multiples of this unit from now on, on all ranks; the sum is empty. Returns their factor."""
        return 1.0

    def reduced(self) -> None:
        """A backward pass has reduced the window's sum."""


_SILENT = Listener()


class Ranks:
    """The windows of all ranks, closed together; on a single device there is nobody to agree with.

    `options` must be the same on every rank. Where a sharded model reduces on every micro-batch, part of the sum is the
    ranks' mean already, and its mean over the ranks is itself, so nothing else changes.
    """

    unit: float | None = None
    """What all ranks' sums are multiples of in a window that a backward pass reduces: a micro-batch's weight, so that
    what is reduced is of the gradients' own size, in float16 too. None until the ranks have agreed on one."""
    loss_scale = 0.0
    """The scale of a GradScaler that all ranks agreed upon at the last window's end."""

    def __init__(
        self,
        engine: Engine | None = None,
        settings: Settings | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        manual_reduce: bool = False,
    ) -> None:
        self.is_distributed = engine is not None
        self.engine: Any = engine or Engine()
        self.sharded = self.engine.sharded
        self.settings = settings or Settings(list)
        """What all ranks compare at a window's end."""
        self.manual = manual_reduce or self.engine.manual_reduce
        """Whether windows are reduced when their sums are finished from now on, as their messages say."""
        self._listener: Callable[[], Listener | None] = lambda: None
        self._waits = False  # with its reduction for the window's end, whichever backward pass closes it
        self._last = self._all_last = False  # whether this rank's epoch is over, and every rank's
        self._micro_batch = _MicroBatch()
        self.engine.attach(self)
        weakref.finalize(self, self.engine.remove).atexit = False
        try:
            self.channel = Channel(self.engine.group, self.engine.members)
            self.messages = Messages(self.channel)
            if self.is_distributed:
                self.messages.check_same(options or {})
        except BaseException:
            self.engine.remove()
            raise
        self.size, self.rank = self.channel.size, self.channel.rank
        self.engine.hold(False)

    def attach(self, listener: Listener) -> None:
        """Call this listener from now on. It is not kept alive."""
        self._listener = weakref.ref(listener)

    def _restart(self, closes: bool = False, steps: int = 0) -> None:
        """A micro-batch begins."""
        self.messages.sent = None
        if self._micro_batch.reducing and self._micro_batch.versions is None:
            self.engine.stuck = True
        self._micro_batch = _MicroBatch(closes, steps)

    def reduce_manually(self) -> None:
        """From now on, reduce windows when their sums are finished."""
        self.manual = True

    @property
    def manual_reduce(self) -> bool:
        """Whether the open window is reduced when its sum is finished, rather than in its last backward pass."""
        # A backward pass reduces in a unit that is known before.
        return self.manual or (self.unit is None and not self.sharded)

    # Passes.

    def expect(self, closes: bool, steps: int, last: bool = False, counts: bool = True) -> None:
        """Before the next micro-batch: whether it closes the window, is the epoch's last here, weighs anything."""
        self._last = last
        self._restart(closes, steps)
        # No backward pass reduces the first window, and that of a checkpoint.
        self.engine.hold(closes and not (self.manual_reduce or self._waits) and (counts or self.sharded))

    def forward_starts(self) -> None:
        """A forward pass starts whose backward pass may reduce."""
        if self._micro_batch.closes and not self._micro_batch.adopted:
            self._micro_batch.adopted = True
            (self._listener() or _SILENT).forward_starts(self.loss_scale)

    def pass_begins(self, gradient: Any = None) -> None:
        """A backward pass that may reduce has come to an output of a model, and to none of its parameters."""
        after_backward(self.pass_over)
        (self._listener() or _SILENT).pass_begins()

    def backward_starts(self) -> None:
        """A backward pass starts that reduces, or any of a sharded model."""
        listener, engine, micro_batch = self._listener() or _SILENT, self.engine, self._micro_batch
        listener.backward_starts()
        if self.sharded and self.unit is None and (unit := engine.meet("unit", listener.own_unit())):
            self.unit = unit
            engine.factor *= listener.take_unit(unit)
        if micro_batch.reducing or not (micro_batch.closes or engine.always) or self.manual_reduce:
            return
        micro_batch.reducing = True
        if self.sharded:
            after_backward(self.pass_over)
        else:
            micro_batch.share = listener.share() if self.settings.known_early else None
            self.messages.send(self._report(micro_batch.share, sees_unused=False))
            engine.hold(False)  # more forward passes of this micro-batch do not belong to it

    def pass_over(self) -> None:
        """A backward pass is over, in which a model has reduced, perhaps."""
        if self._micro_batch.reducing and self._micro_batch.versions is None:
            self._micro_batch.versions = self._current_versions()
            (self._listener() or _SILENT).reduced()

    def early_over(self) -> None:
        """A backward pass is over in which DDP has reduced an open window, as `discard` came behind a forward pass.

        Part of the sum is the ranks' mean by now, if all of them did so, and its mean over the ranks is itself.
        """
        (self._listener() or _SILENT).reduced()

    def check_finished(self, whose: str) -> None:
        """Raise a WindowError, on all ranks, where DDP's reduction has not come to its end."""
        try:
            self.engine.check_finished(whose)
        except WindowError:
            self._restart()
            self.engine.stuck = True
            raise

    def _current_versions(self) -> list[tuple[int, int]]:
        """Empty for a sharded model, which reduces in every backward pass of this micro-batch."""
        trained = () if self.sharded else self.engine.trained()
        return [(0, -1) if (gradient := p.grad) is None else (id(gradient), gradient._version) for p in trained]

    # The window's sum.

    @property
    def reduced(self) -> bool:
        """Whether a backward pass has reduced the open window's sum."""
        return self._micro_batch.versions is not None

    def total(
        self, mine: Total, rescale: Callable[[float, float], None] | None = None, sums: Sequence[float] = ()
    ) -> Closed:
        """Bring `p.grad` to its mean over the ranks, at the window's end. Returns what the window weighs on all.

        Where no backward pass has reduced it, `sums` go along, to be added up.

        `rescale` brings this rank's sum to the unit and the GradScaler's scale that it is called with, if no backward
        pass has reduced it.
        """
        self._check_unchanged(mine)
        reports, unit, scale, reduced = self._micro_batch.reports, self.unit or 1.0, mine.scale, self.reduced
        if reports is None:  # else other ranks close a window in which this one has nothing
            if self.messages.sent is None:
                self.messages.send(self._report(mine), sums)
            reports, sums = self.messages.read()
        late = self.sharded and reduced
        if not reduced:
            if not self.sharded and (self.unit is None or reports.all_manual):
                unit = reports.total.largest or unit
            scale = self._reduce(reports, unit, rescale)
        if not reports.known:
            reports, late = self.messages.meet(self._report(mine._replace(scale=scale), Kind.TOTAL)), True
        self._restart()
        self._finish(reports)
        if not reports.same_settings:
            self.settings.settle(self.channel)
        closed = Closed(reports.total, unit, reports.source if reports.partly_idle else None, sums)
        return self._in_one_scale(closed, reports, late=late)

    def _in_one_scale(self, closed: Closed, reports: Reports, *, late: bool) -> Closed:
        """The window, if its gradients have been reduced in one scale of the ranks' GradScalers, or lost as overflown.

        `late`: the ranks have learned their scales after the reduction.
        """
        total = closed.total
        if total.scale < 0 and not total.overflow and (reports.partly_idle or reports.scales):
            raise WindowError(
                "scaler.unscale_() has divided the gradients of some ranks by a loss scale that it doesn't tell, and "
                "other ranks had no micro-batch in this window, or another scale. Nothing was updated. Remove it: the "
                "wrapper unscales, and clips with clip_grad_norm=."
            )
        if late and reports.scales and not total.overflow:
            logger.warning(
                "No update: backward passes have reduced gradients in different scales of the ranks' GradScalers: %s. "
                "From the next window on, they have one.",
                by_rank(reports.scales),
            )
            return closed._replace(total=total._replace(overflow=True))
        return closed

    def _reduce(self, reports: Reports, unit: float, rescale: Callable[[float, float], None] | None) -> float:
        """Reduce the finished sum, in unit and scale of those that a backward pass reduces. Returns the scale."""
        scale = reports.total.scale
        if scale and not reports.known:
            scale = self.loss_scale or scale
        if rescale is not None:
            rescale(unit, scale)
        self.engine.reduce()
        return scale

    def _check_unchanged(self, mine: Total) -> None:
        """Raise where the window has become another one than a backward pass has reduced, or has reduced in part."""
        self.check_finished("this window's")
        reduced, share = self._micro_batch.versions, self._micro_batch.share
        if reduced is not None and (reduced != self._current_versions() or share not in (None, mine)):
            self._restart()  # the others may have made their update
            raise WindowError(
                "This window's gradient or weight was changed after a backward pass had reduced it over the ranks, by "
                "another backward pass or weight. Other ranks may have made the update without it, so continue from a "
                "checkpoint. Run one backward pass per micro-batch, (loss + other_loss).backward(), or as many as now "
                "from the first window on."
            )

    def _finish(self, reports: Reports) -> None:
        """The window is reduced: the engine begins anew. Raises where the ranks' sums can't be put together."""
        if len({*reports.lengths} - {0}) > 1:
            raise WindowError(f"`steps` must be the same on every rank. Received: {by_rank(reports.lengths)}.")
        if self.sharded:
            self._check_lasts(reports)
        if not reports.same_passes:
            self.engine.settle()
            raise WindowError(DIFFERENT_PASSES)
        if reports.fills:
            self.drop_common(self.engine.unused())
        self.engine.settle(reports.source)
        self._waits, self._all_last, self.manual = False, reports.last, self.manual or reports.manual
        self.loss_scale = reports.loss_scale or self.loss_scale
        self.unit = reports.total.largest or self.unit
        if reports.ways:
            raise WindowError(
                "Some ranks weigh their micro-batches, by batches() or backward(loss, weight=...), and others don't: "
                f"{reports.ways}. Nothing was updated. Weigh them in the same way on every rank."
            )

    def _check_lasts(self, reports: Reports) -> None:
        if len({*reports.lasts}) > 1:
            raise WindowError(_FEWER.format(by_rank(reports.lasts)))

    def drop_common(self, unused: list[int]) -> None:
        """What no rank has used, by number, has no gradient, as on one device: an optimizer passes it over."""
        trained = self.engine.trained()
        flags = torch.zeros(len(trained), dtype=torch.int32)
        flags[unused] = 1
        for index in (self.channel.sum(flags) == self.size).nonzero().flatten().tolist():
            trained[index].grad = None

    def reduce_pending(self) -> None:
        """Have all that a sharded model's open window has added up in `p.grad`, to be saved. All ranks take part."""
        # The mean over the ranks of a part of the sum; what comes is added to it, and the mean of that is right.
        self.engine.reduce()
        self.drop_common(self.engine.unused())

    def resume(self, unit: float | None) -> None:
        """A checkpoint is loaded, of ranks with this unit: the first window shows what no checkpoint holds."""
        self.unit, self._waits = unit, not self.sharded

    # Epochs.

    def end_epoch(self) -> None:
        """This rank's epoch is over."""
        self._last = True

    def others_continue(self) -> bool:
        """Whether other ranks close one more window, in which this one takes part with nothing."""
        while self.is_distributed and not self._all_last:
            weighs_nothing = Total(0.0, idle=True) if self.settings.known_early else None
            reports = self.messages.meet(self._report(weighs_nothing, idle=True))
            if reports.closes:
                self._micro_batch.reports = reports
                if self.sharded:
                    self._check_lasts(reports)
                return True
            self._all_last = reports.last
            if not self._last:
                break
        return False

    def begin_epoch(self) -> None:
        """The epoch is over on all ranks: the next one may begin."""
        self._last = self._all_last = False

    def abort(self, *, notified: bool = False) -> None:
        """An error, or a `break`, has ended this rank's epoch. The others learn it from the process group alone."""
        if self.sharded:
            self.engine.stop()

    def _report(
        self, total: Total | None, kind: Kind = Kind.WINDOW, *, idle: bool = False, sees_unused: bool = True
    ) -> Report:
        """A report about a window, which is complete where the total is known."""
        known, last = total is not None, self._last or self._all_last
        fills = idle or (sees_unused and bool(self.engine.unused()))
        settings, steps = self.settings.number() if known else 0.0, 0 if idle else self._micro_batch.steps
        total = total or Total(0.0, idle=idle)
        return Report(kind, steps, last, known, self.manual, fills, self.engine.passes, settings, total)
