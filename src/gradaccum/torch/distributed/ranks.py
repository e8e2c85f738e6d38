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

import enum
import json
import logging
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import after_backward
from gradaccum.torch.distributed.channel import LENGTH, Channel
from gradaccum.torch.distributed.engine import Engine
from gradaccum.torch.distributed.fsdp import DIFFERENT_PASSES
from gradaccum.torch.distributed.settings import Settings, by_rank

logger = logging.getLogger("gradaccum")


class Kind(enum.IntEnum):
    """What a message is about."""

    WINDOW = 1  # this rank comes to the reduction of a window, or has nothing to reduce; what it weighs, if known
    TOTAL = 2  # what the window weighs, after its reduction: where that was not known before
    NUMBER = 3  # numbers of all ranks in between


_FEWER = (
    "A sharded model needs the same number of batches on every rank. Whether the epoch is over: {}. Nothing was "
    "updated. Pad or drop batches (DistributedSampler does), or use TrainStep or DistributedDataParallel, which take "
    "different numbers."
)


class Total(NamedTuple):
    """What a window weighs: on one rank, or over all of them."""

    weight: float
    given: bool = False  # whether a weight was given anywhere
    largest: float = 0.0  # the largest weight of a micro-batch
    scale: float = 0.0  # the GradScaler's, that the sum is multiplied by; 0 without one, negative if unknown
    next_scale: float = 0.0  # the one that this rank's GradScaler would go on with
    overflow: bool = False  # whether a gradient has overflowed that scale
    equal: bool = False  # whether micro-batches count equally, since nobody has said what they weigh
    idle: bool = False  # whether no micro-batch has run


class _Report(NamedTuple):
    """A rank's message about its window."""

    kind: Kind
    steps: float = 0
    last: float = False
    known: float = False  # whether the total and the settings are what they will be at the update
    manual: float = False  # whether windows are reduced when their sums are finished from now on
    fills: float = False  # whether a parameter has no gradient on this rank
    passes: float = 0
    settings: float = 0.0
    total: Total = Total(0.0)

    def numbers(self) -> list[float]:
        return [*self[:-1], *self.total]


_NUMBERS = len(_Report._fields) - 1 + len(Total._fields)
"""Of a report's message. What comes behind them is to be added up over the ranks."""
_ROOM = LENGTH - 1 - _NUMBERS
"""So many numbers at most come behind a report."""


class _Reports:
    """The messages of all ranks about a window, and what they come to."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows, columns = rows, [*zip(*rows)]
        _, steps, last, known, manual, fills, passes, settings = columns[:8]
        self.lengths, self.lasts = [*map(int, steps)], [*map(bool, last)]
        weights, given, largest, scales, next_scales, overflow, equal, idle = columns[8:]
        used = {*scales} - {0.0}
        lost, self.scales = any(overflow), scales if len(used) > 1 else ()
        shared = sum(weights), any(given), max(largest), min(used, default=0.0)
        self.total = Total(*shared, overflow=lost)
        self.loss_scale = (min if lost else max)(filter(None, next_scales), default=0.0)
        self.source = min(range(len(idle)), key=idle.__getitem__)
        self.partly_idle, self.closes = len({*idle}) > 1, any(steps)
        self.last, self.known, self.fills = all(last), all(known), any(fills)
        self.manual, self.all_manual = any(manual), all(manual)
        ways = ["without a weight" if one else "weighed" if weight else "none" for one, weight in zip(equal, weights)]
        self.ways = by_rank(ways) if {"without a weight", "weighed"} <= {*ways} else ""
        self.same_passes, self.same_settings = len({*passes}) == 1, len({*settings}) == 1


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
    reduced_unit = 1.0
    """What the sum is a multiple of that `total` has reduced last."""
    buffers_from: int | None = None
    """The first rank whose micro-batches have run in the last window; None where they have on all ranks, or on none."""
    loss_scale = 0.0
    """The scale of a GradScaler that all ranks agreed upon at the last window's end."""
    sums: Sequence[float] = ()
    """What the ranks' reports had beside the last window's end adds up to."""

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
        self._closes = self._reducing = False
        self._waits = False  # with its reduction for the window's end, whichever backward pass closes it
        self._last = self._all_last = False  # whether this rank's epoch is over, and every rank's
        self._steps = 0
        self._sent: Any = None  # a message that the other ranks' answers have not been read of
        self._before: _Reports | None = None  # of the window before, to which those of the next are mostly equal
        self.engine.attach(self)
        weakref.finalize(self, self.engine.remove).atexit = False
        try:
            self.channel = Channel(self.engine.group, self.engine.members)
            if self.is_distributed:
                self._check_same(options or {})
        except BaseException:
            self.engine.remove()
            raise
        self.size, self.rank = self.channel.size, self.channel.rank
        self._restart()
        self.engine.hold(False)

    def attach(self, listener: Listener) -> None:
        """Call this listener from now on. It is not kept alive."""
        self._listener = weakref.ref(listener)

    def _restart(self) -> None:
        """A micro-batch begins."""
        self._sent = None  # of one that was never counted
        if self._reducing and self._versions is None:
            self.engine.stuck = True
        self._reports: _Reports | None = None  # of all ranks, about the window that closes
        self._share: Total | None = None  # what this rank's has said that it weighs
        self._adopted = self._reducing = False
        self._versions: list[tuple[int, int]] | None = None  # of the gradients, when a backward pass had reduced them

    def reduce_manually(self) -> None:
        """From now on, reduce windows when their sums are finished."""
        self.manual = True

    @property
    def manual_reduce(self) -> bool:
        """Whether the open window is reduced when its sum is finished, rather than in its last backward pass."""
        # A backward pass reduces in a unit that is known before.
        return self.manual or (self.unit is None and not self.sharded)

    @property
    def waits(self) -> bool:
        """Whether no backward pass reduces the open window, as in the first one and in that of a checkpoint."""
        return self.manual_reduce or self._waits

    def _check_same(self, options: Mapping[str, Any]) -> None:
        mine = json.dumps({name: repr(value) for name, value in options.items()})
        everybody: list[dict[str, str]] = [*map(json.loads, self.channel.texts(mine))]
        for name in dict.fromkeys(name for theirs in everybody for name in theirs):
            values = [theirs.get(name, "none") for theirs in everybody]
            if len({*values}) > 1:
                raise ValueError(f"`{name}` must be the same on every rank. Received: {by_rank(values)}.")

    # Passes.

    def expect(self, closes: bool, steps: int, last: bool = False, counts: bool = True) -> None:
        """Before the next micro-batch: whether it closes the window, is the epoch's last here, weighs anything."""
        self._closes, self._steps, self._last = closes, steps, last
        self._restart()
        self.engine.hold(closes and not self.waits and (counts or self.sharded))

    def forward_starts(self) -> None:
        """A forward pass starts whose backward pass may reduce."""
        if self._closes and not self._adopted:
            self._adopted = True
            (self._listener() or _SILENT).forward_starts(self.loss_scale)

    def pass_begins(self, gradient: Any = None) -> None:
        """A backward pass that may reduce has come to an output of a model, and to none of its parameters."""
        after_backward(self.pass_over)
        (self._listener() or _SILENT).pass_begins()

    def backward_starts(self) -> None:
        """A backward pass starts that reduces, or any of a sharded model."""
        listener, engine = self._listener() or _SILENT, self.engine
        listener.backward_starts()
        if self.sharded and self.unit is None and (unit := engine.meet("unit", listener.own_unit())):
            self.unit = self.reduced_unit = unit
            engine.factor *= listener.take_unit(unit)
        if self._reducing or not (self._closes or engine.always) or self.manual_reduce:
            return
        self._reducing = True
        if self.sharded:
            after_backward(self.pass_over)
        else:
            self._share = listener.share() if self.settings.known_early else None
            self._send(self._report(self._share, sees_unused=False))
            engine.hold(False)  # more forward passes of this micro-batch do not belong to it

    def pass_over(self) -> None:
        """A backward pass is over, in which a model has reduced, perhaps."""
        if self._reducing and self._versions is None:
            self._versions = self._current_versions()
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
        return self._versions is not None

    def total(
        self, mine: Total, rescale: Callable[[float, float], None] | None = None, sums: Sequence[float] = ()
    ) -> Total:
        """Bring `p.grad` to its mean over the ranks, at the window's end. Returns what the window weighs on all.

        Where no backward pass has reduced it, `sums` go along, to be added up in `self.sums`.

        `rescale` brings this rank's sum to the unit and the GradScaler's scale that it is called with, if no backward
        pass has reduced it.
        """
        self._check_unchanged(mine)
        rides = [*sums] if len(sums) <= _ROOM else []
        if self._sent is None and self._reports is None:
            self._send(self._report(mine), rides)
        if self._sent is not None:
            self._read()
        reports, self.reduced_unit, late = self._reports, self.unit or 1.0, self.sharded and self.reduced
        assert reports is not None
        scale = mine.scale if self.reduced else self._reduce(reports, rescale)
        if not reports.known:
            mine = mine._replace(scale=scale)
            reports, late = self._meet(self._report(mine, Kind.TOTAL)), True
        if len(sums) > _ROOM:
            self.sums = self.channel.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        self._restart()
        self._finish(reports)
        if not reports.same_settings:
            self.settings.settle(self.channel)
        total = reports.total
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
            return total._replace(overflow=True)
        return total

    def _reduce(self, reports: _Reports, rescale: Callable[[float, float], None] | None) -> float:
        """Reduce the finished sum, in unit and scale of those that a backward pass reduces, else the largest weight."""
        if not self.sharded and (self.unit is None or reports.all_manual):
            self.reduced_unit = reports.total.largest or self.reduced_unit
        scale = reports.total.scale
        if scale and not reports.known:
            scale = self.loss_scale or scale
        if rescale is not None:
            rescale(self.reduced_unit, scale)
        self.engine.reduce()
        return scale

    def _check_unchanged(self, mine: Total) -> None:
        """Raise where the window has become another one than a backward pass has reduced, or has reduced in part."""
        self.check_finished("this window's")
        if self.reduced and (self._versions != self._current_versions() or self._share not in (None, mine)):
            self._restart()  # the others may have made their update
            raise WindowError(
                "This window's gradient or weight was changed after a backward pass had reduced it over the ranks, by "
                "another backward pass or weight. Other ranks may have made the update without it, so continue from a "
                "checkpoint. Run one backward pass per micro-batch, (loss + other_loss).backward(), or as many as now "
                "from the first window on."
            )

    def _finish(self, reports: _Reports) -> None:
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
        self.buffers_from = reports.source if reports.partly_idle else None
        self.engine.settle(reports.source)
        self._waits, self._all_last, self.manual = False, reports.last, self.manual or reports.manual
        self.loss_scale = reports.loss_scale or self.loss_scale
        self.unit = reports.total.largest or self.unit
        if reports.ways:
            raise WindowError(
                "Some ranks weigh their micro-batches, by batches() or backward(loss, weight=...), and others don't: "
                f"{reports.ways}. Nothing was updated. Weigh them in the same way on every rank."
            )

    def _check_lasts(self, reports: _Reports) -> None:
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

    # Numbers of all ranks. All ranks take part.

    def numbers(self, mine: float) -> list[float]:
        """Every rank's number."""
        return [numbers[0] for numbers in self.exchange(mine)]

    def sum_by_name(self, mine: Mapping[Any, float]) -> dict[Any, float]:
        """Numbers summed over the ranks, each by its name; some ranks may lack some names."""
        names, numbers = [*mine], [*mine.values()]
        rides = numbers if len(numbers) <= LENGTH - 3 else []
        messages = self.exchange(zlib.crc32(repr(names).encode()), *rides)
        if len({message[0] for message in messages}) > 1:
            by_text = {name if isinstance(name, str) else repr(name): name for name in names}
            everybody = [json.loads(text) for text in self.channel.texts(json.dumps([*by_text]))]
            names = [by_text.get(text, text) for text in dict.fromkeys(text for texts in everybody for text in texts)]
            numbers, rides = [mine.get(name, 0.0) for name in names], []
        if rides:
            return {name: sum(message[1 + i] for message in messages) for i, name in enumerate(names)}
        return dict(zip(names, self.channel.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()))

    # Epochs.

    def end_epoch(self) -> None:
        """This rank's epoch is over."""
        self._last = True

    def others_continue(self) -> bool:
        """Whether other ranks close one more window, in which this one takes part with nothing."""
        while self.is_distributed and not self._all_last:
            reports = self._meet(self._report(Total(0.0, idle=True) if self.settings.known_early else None, idle=True))
            if reports.closes:
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

    # Messages.

    def _report(
        self, total: Total | None, kind: Kind = Kind.WINDOW, *, idle: bool = False, sees_unused: bool = True
    ) -> _Report:
        """A message about a window, which is complete where the total is known."""
        known, last = total is not None, self._last or self._all_last
        fills = idle or (sees_unused and bool(self.engine.unused()))
        settings, steps = self.settings.number() if known else 0.0, 0 if idle else self._steps
        total = total or Total(0.0, idle=idle)
        return _Report(kind, steps, last, known, self.manual, fills, self.engine.passes, settings, total)

    def _meet(self, report: _Report) -> _Reports:
        """Send a message, and wait for every rank's."""
        self._send(report)
        return self._read()

    def _send(self, report: _Report, sums: Sequence[float] = ()) -> None:
        self._sent = report.kind, len(sums), self.channel.send(*report.numbers(), *sums)

    def _read(self) -> _Reports:
        """Wait for every rank's answer to the message that was sent; what they say about a window's end is kept."""
        (kind, rides, sent), self._sent = self._sent, None
        messages = self.channel.receive(sent)
        self._check_kinds(messages, kind)
        if rides:
            self.sums = [sum(numbers[_NUMBERS + i] for numbers in messages) for i in range(rides)]
        rows = [numbers[:_NUMBERS] for numbers in messages]
        if self._before is None or rows != self._before.rows:
            self._before = _Reports(rows)
        if kind is Kind.WINDOW and self._before.closes:
            self._reports = self._before
        return self._before

    def exchange(self, *numbers: float) -> list[list[float]]:
        """Every rank's numbers, which zeros follow."""
        messages = self.channel.exchange(Kind.NUMBER, *numbers)
        self._check_kinds(messages, Kind.NUMBER)
        return [message[1:] for message in messages]

    def _check_kinds(self, messages: Sequence[Sequence[float]], expected: Kind) -> None:
        """Raise if a rank is not where this one is."""
        if any(message[0] != expected for message in messages):
            kinds = [Kind(int(message[0])).name for message in messages]
            raise WindowError(
                f"The ranks are at different places: {by_rank(kinds)}. Nothing was updated. Call step(), flush() and "
                "batches() in the same order on every rank."
            )
