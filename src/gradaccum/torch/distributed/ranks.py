"""Data parallel training on several ranks: one message and one reduction of the gradients per window.

Each rank sums its micro-batches in `p.grad`, in multiples of a unit that all ranks share; the model's own reduction
turns the sums into their mean over the ranks; dividing that gives the mean over all rows of all ranks:

    S_r = sum_i (w_ri / unit) g_ri      A = sum_r S_r / ranks      gradient = A / (W / (unit * ranks)),  W = sum w_ri

So ranks need not have the same rows, weights or numbers of micro-batches. The unit is the largest weight of a
micro-batch, so what is reduced is of the gradients' own size.

A window's message says that this rank comes to the reduction, and what its part of the window weighs:

    backward()   DDP: WINDOW is sent, travels during the pass, and is read before the first bucket is reduced
    step()       where no backward pass has reduced: FINISHED is sent and read, then the sum is reduced
    step()       TOTAL, where a WINDOW could not say the weight, and in windows 1, 2, 4, 8, ... to compare

A sharded model's ranks meet in each of its collectives, so one TOTAL after the last backward pass does. A rank whose
window came to weigh something else than its WINDOW said (another backward pass, another weight) sends a TOTAL that the
others don't expect: exact if all ranks do so, and an error on all of them otherwise.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import after_backward
from gradaccum.torch.distributed.by_blocks import ByBlocks, ShardedByBlocks
from gradaccum.torch.distributed.channel import Channel, Kind
from gradaccum.torch.distributed.ddp import Replicas
from gradaccum.torch.distributed.fsdp import Shards
from gradaccum.torch.distributed.single_rank import (
    SUMS,
    Listener,
    RankOutOfMemory,
    Settings,
    SingleRank,
    Total,
    by_rank,
)
from gradaccum.torch.distributed.together import DIFFERENT_PASSES, Together

__all__ = ["Ranks"]

_CLOSING = Kind.WINDOW, Kind.FINISHED, Kind.IDLE
_NOBODY: Callable[[], Listener | None] = lambda: None  # noqa: E731


class _Report(NamedTuple):
    """A rank's message about its window."""

    kind: Kind
    steps: int = 0
    last: bool = False
    known: bool = False
    """Whether the total and the settings are what they will be at the update."""
    late: bool = False
    """Whether another backward pass came after the one that reduced."""
    fills: bool = False
    """Whether zeros are reduced for a parameter that has no gradient on this rank."""
    passes: int = 0
    settings: float = 0.0
    total: Total = Total(0.0)

    def numbers(self) -> list[float]:
        *total, sums = self.total
        return [*self[:-1], *total, *sums, *[0.0] * (SUMS - len(sums))]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> _Report:
        kind, steps, last, known, late, fills, passes, settings, *total = numbers
        weight, given, largest, scale, next_scale, overflow, equal, idle, *sums = total
        found = Total(
            weight, bool(given), largest, scale, next_scale, bool(overflow), bool(equal), bool(idle), tuple(sums)
        )
        flags = bool(last), bool(known), bool(late), bool(fills)
        return cls(Kind(int(kind)), int(steps), *flags, int(passes), settings, found)


class Ranks(SingleRank):
    """The windows of all ranks, closed together.

    `options` must be the same on every rank. `always` reduces on every micro-batch: part of the sum is then the ranks'
    mean already, and its mean over the ranks is itself, so nothing else changes.
    """

    is_distributed = True

    def __init__(
        self,
        engine: Replicas | Shards,
        parameters: Sequence[Tensor],
        settings: Settings,
        *,
        steps: int | None = None,
        options: Mapping[str, Any] | None = None,
        manual_reduce: bool = False,
        always: bool = False,
    ) -> None:
        self._always, self._manual = always, manual_reduce
        self._listener = _NOBODY
        self._parameters, self.settings = list(parameters), settings
        self._engine, self.sharded = engine, engine.sharded
        engine.attach(self)
        weakref.finalize(self, engine.remove).atexit = False
        if isinstance(engine, Shards):
            self._together = Together(engine, self._exchange_of_passes)
        try:
            self._channel = Channel(engine.members, engine.group)
            self._check_same(steps, options or {})
        except BaseException:
            engine.remove()
            raise
        self.size, self.rank = self._channel.size, self._channel.rank
        self._closes = self._restored = self._uncounted = self._notified = False
        self._last = self._all_last = False  # whether this rank's epoch is over, and every rank's
        self._steps = self._windows = 0
        self._settings: float | None = None
        self._sent: Any = None
        """A message that the other ranks' answers have not been read of."""
        self._restart()
        engine.hold(False, False)

    def attach(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)

    def _listening(self) -> Listener:
        return self._listener() or _SILENT

    def _restart(self) -> None:
        """A micro-batch begins."""
        if self._sent is not None:  # of one that was never counted
            self._read()
        self._reports: list[_Report] | None = None  # of all ranks, about the window that closes
        self._share: Total | None = None  # what this rank's has said that it weighs
        self._reducing = False
        self._versions: list[tuple[int, int]] | None = None  # of the gradients, when a backward pass had reduced them

    def reduce_manually(self) -> None:
        self._manual = True

    @property
    def manual_reduce(self) -> bool:  # type: ignore[override]
        # A backward pass reduces in a unit that is known before.
        return self._manual or self._engine.manual_reduce or (self.unit is None and not self.sharded)

    def _check_same(self, steps: int | None, options: Mapping[str, Any]) -> None:
        texts = {name: repr(value) for name, value in options.items()}
        messages = self._channel.exchange(Kind.START, steps or 0, zlib.crc32(repr(texts).encode()))
        lengths = [int(numbers[1]) for numbers in messages]
        if len({*lengths}) > 1:
            raise ValueError(f"`steps` must be the same on every rank. Received: {by_rank(lengths)}.")
        if len({numbers[2] for numbers in messages}) > 1:
            everybody = self._channel.gather(texts)
            for name in dict.fromkeys(name for theirs in everybody for name in theirs):
                values = [theirs.get(name, "none") for theirs in everybody]
                if len({*values}) > 1:
                    raise ValueError(f"`{name}` must be the same on every rank. Received: {by_rank(values)}.")

    # Passes.

    def expect(self, closes: bool, steps: int, last: bool = False, counts: bool = True) -> None:
        self._closes, self._steps, self._last = closes, steps, last
        self._restart()
        # DDP remembers which parameters a micro-batch used, although its gradient is taken out of the sum.
        self._uncounted |= not counts and self._engine.finds_unused
        waits = self.manual_reduce or self._restored or self._uncounted or not (counts or self.sharded)
        self._engine.hold(closes and not waits, self._always and not waits)

    def agree_on_last(self, last: bool) -> bool:
        if self.sharded:
            lasts = [report.last for report in self._meet(_Report(Kind.MICRO_BATCH, last=last))]
            if len({*lasts}) > 1:
                raise WindowError(
                    f"A sharded model needs the same passes on every rank. The last batch has come: {by_rank(lasts)}. "
                    "Nothing was updated. Pad or drop batches (DistributedSampler does), or use TrainStep or "
                    "DistributedDataParallel, which take different numbers."
                )
        return last

    def scale(self, factor: float, idle: bool = False) -> None:
        self._engine.scale(factor, idle)

    def continue_window(self) -> None:
        if self._sent is not None:
            self._read()
        if self._always and not self.manual_reduce and not self.reduced:
            self._meet(_Report(Kind.MICRO_BATCH, self._steps, self._last))
            self._engine.reduce()
            self._engine.continues()
            self._reduction_done()

    # What the model's hooks call.

    def forward_starts(self, part: str) -> None:
        """The forward pass of a sharded part begins, of which the ranks are compared; "": all of them are done."""
        self._together.meet(part)

    def forward_done(self) -> None:
        """A forward pass whose backward pass reduces is done."""
        if self._closes:
            self._listening().forward_done(self.loss_scale)

    def backward_starts(self) -> None:
        """Its backward pass starts, or any of a sharded model."""
        listener = self._listening()
        listener.backward_starts()
        if self.sharded and self.unit is None and (unit := self._together.meet("unit", listener.own_unit())):
            self.unit = self.reduced_unit = unit
            self._engine.scale_more(listener.take_unit(unit))
        if not (self._closes or self._always) or self.manual_reduce:
            return
        if not self._reducing:
            self._reducing = True
            if isinstance(self._engine, Replicas):
                if self._closes:
                    self._share = listener.share() if self.settings.known_early else None
                    self._send(self._report(Kind.WINDOW, self._share, fills=self._engine.filled))
                else:
                    self._send(_Report(Kind.MICRO_BATCH, self._steps, self._last))
                self._engine.before_first_bucket(self.first_bucket)
            after_backward(self._reduction_done)
        self._engine.starts()

    def first_bucket(self) -> None:
        """DDP is about to reduce: a rank that won't come is missed now, before anybody waits for it there."""
        if self._sent is not None:
            self._read()

    def _reduction_done(self) -> None:
        self._versions = self._current_versions()
        self._listening().reduced()

    def _current_versions(self) -> list[tuple[int, int]]:
        if self.sharded:  # it reduces in every backward pass of this micro-batch
            return []
        return [(0, -1) if p.grad is None else (id(p.grad), p.grad._version) for p in self._parameters]

    # Passes of a sharded model.

    def begin_passes(self) -> None:
        if self.sharded:
            self._together.begin()

    def end_passes(self) -> None:
        if self.sharded:
            self._together.end()

    def ran_out(self, cost: int, *, final: bool) -> RankOutOfMemory:
        return self._together.ran_out(cost, final=final)

    @property
    def failure(self) -> RankOutOfMemory | None:
        return self._together.failure if self.sharded else None

    def start_over(self) -> None:
        if self.sharded:
            self._together.start_over()

    def by_blocks(self, model: nn.Module, blocks: Sequence[nn.Module]) -> ByBlocks:
        return ShardedByBlocks(self, self._engine, model, blocks) if isinstance(self._engine, Shards) else ByBlocks()

    def alone(self) -> contextlib.AbstractContextManager[dict[Tensor, torch.dtype]]:
        return self._together.shards.alone() if self.sharded else super().alone()

    def gathered_bytes(self, gradients: int) -> int:
        return self._together.shards.gathered_bytes(gradients) if self.sharded else gradients

    # The window's sum.

    def clear(self) -> None:
        self._engine.clear()

    @property
    def pending(self) -> Callable[[], list[Tensor]]:
        return self._engine.pending

    @property
    def reduced(self) -> bool:
        return self._versions is not None

    def total(self, mine: Total, rescale: Callable[[float], None] | None = None) -> Total:
        self._windows += 1
        self._settings = None  # what a message has said before is compared
        if self.reduced:
            self.reduced_unit = self.unit or 1.0
        late = self.reduced and self._versions != self._current_versions()
        changed = late or self._share not in (None, mine)
        if self.sharded and self.reduced:
            reports = self._meet(self._report(Kind.TOTAL, mine, fills=self._engine.filled))
        else:
            reports = self._closing(mine)
            if not self.reduced:
                self._reduce(reports, rescale)
            self._engine.prepare()
            compares = self._windows & (self._windows - 1) == 0 and any(r.kind is Kind.WINDOW for r in reports)
            if changed or compares or not all(report.known for report in reports):
                reports = self._meet(self._report(Kind.TOTAL, mine, late=late, fills=self._engine.filled))
        self._restart()
        self._finish(reports)
        total = self._added(reports)
        _check_weighed([report.total for report in reports])
        if len({report.settings for report in reports}) > 1:
            self.settings.settle(self)
        return total

    def _closing(self, mine: Total) -> list[_Report]:
        """What all ranks have said before the reduction."""
        if self._sent is None and self._reports is None:
            self._send(self._report(Kind.FINISHED, mine, fills=self._engine.will_fill))
        if self._sent is not None:
            self._read()
        assert self._reports is not None
        return self._reports

    def _reduce(self, reports: list[_Report], rescale: Callable[[float], None] | None) -> None:
        """Reduce the finished sum, in the unit of those that a backward pass reduces, else the largest weight."""
        if self.sharded or any(report.kind is Kind.WINDOW for report in reports):
            self.reduced_unit = self.unit or 1.0
        else:
            self.reduced_unit = max(report.total.largest for report in reports) or self.unit or 1.0
        if rescale is not None:
            rescale(self.reduced_unit)
        self._together.reduce() if self.sharded else self._engine.reduce()

    def _finish(self, reports: list[_Report]) -> None:
        """The window is reduced: what stands beside the mean over the ranks goes, and the engine begins anew."""
        if len({report.passes for report in reports}) > 1:
            self._engine.settle()
            raise WindowError(DIFFERENT_PASSES)
        if any(report.late for report in reports):
            # Another backward pass came after the one that reduced. Its gradients stand beside the mean over the ranks,
            # and the mean of that sum is right. From now on the reduction waits until step().
            self._engine.reduce()
            self._manual = True
        if any(report.fills or report.late for report in reports):
            self._drop_unused()
        idle = [report.total.idle for report in reports]
        source = idle.index(False) if False in idle else 0
        self.buffers_from = source if any(idle) and not all(idle) else None
        self._engine.settle(source)
        self._restored = self._uncounted = False
        self._all_last = all(report.last for report in reports)

    def _added(self, reports: list[_Report]) -> Total:
        """What the window weighs on all ranks."""
        totals = [report.total for report in reports]
        used = {total.scale for total in totals if total.scale}
        # Where scales differ nevertheless, the sum is lost, as after an overflow.
        overflow = any(total.overflow for total in totals) or len(used) > 1
        scales = [total.next_scale for total in totals if total.next_scale]
        self.loss_scale = (min if overflow else max)(scales, default=self.loss_scale)
        largest = max(total.largest for total in totals)
        self.unit = largest or self.unit
        return Total(
            sum(total.weight for total in totals),
            any(total.given for total in totals),
            largest,
            min(used, default=0.0),
            self.loss_scale,
            overflow,
            sums=tuple(map(sum, zip(*(total.sums for total in totals)))),
        )

    def compare_settings(self) -> None:
        if len({*self._numbers(self.settings.number())}) > 1:
            self.settings.settle(self)

    def _drop_unused(self) -> None:
        """What no rank has used in this window has no gradient, as on one device: an optimizer passes it over."""
        self._engine.drop(set.intersection(*map(set, self._channel.gather(self._engine.unused()))))

    def reduce_pending(self) -> None:
        # The mean over the ranks of a part of the sum; what comes is added to it, and the mean of that is right.
        self._engine.reduce()
        self._drop_unused()

    def restored(self, parameters: Sequence[Tensor]) -> None:
        self._restored = not self.sharded
        if isinstance(self._engine, Shards):
            self._engine.restored(parameters)

    # Numbers and objects of all ranks.

    def sum(self, tensor: Tensor) -> Tensor:
        return self._engine.sum(tensor)

    def sum_number(self, number: float) -> float:
        return sum(self._numbers(number))

    def sum_by_name(self, mine: Mapping[Any, float]) -> dict[Any, float]:
        names = dict.fromkeys(name for theirs in self.gather_different(list(mine)) for name in theirs)
        return {name: self.sum_number(mine.get(name, 0.0)) for name in names}

    def most_passes(self, passes: int) -> int:
        return int(max(self._numbers(passes))) if self.sharded else passes

    def gather(self, mine: Any) -> list[Any]:
        return self._channel.gather(mine)

    def gather_different(self, mine: Any) -> list[Any]:
        same = len({*self._numbers(zlib.crc32(repr(mine).encode()))}) == 1
        return [mine] if same else self.gather(mine)

    def broadcast(self, mine: Any, source: int) -> Any:
        return self._channel.broadcast(mine, source)

    def _numbers(self, number: float) -> list[float]:
        return [numbers[1] for numbers in self._exchange(Kind.NUMBER, number)]

    # Epochs.

    def end_epoch(self) -> None:
        self._last = True

    def others_continue(self) -> bool:
        while not self._all_last:
            idle = self._report(Kind.IDLE, Total(0.0, idle=True) if self.settings.known_early else None, fills=True)
            if self.sharded and self._last:
                idle = _Report(Kind.ENDED, last=True)
            reports = self._meet(idle)
            if self._reports is not None:
                return True
            self._all_last = all(report.last for report in reports)
            if not self._last:
                break
        return False

    def begin_epoch(self) -> None:
        self._last = self._all_last = False

    def offer_end(self) -> None:
        if not self._all_last:
            self._send(_Report(Kind.ENDED, last=True))

    def check_end(self) -> None:
        if self._sent is not None:
            self._read()
            self._all_last = True

    def abort(self, *, notified: bool = False) -> None:
        self._notified = notified
        if self.sharded:
            self._together.abort()
        if not (self._all_last or self._sent is not None or self._reports is not None):
            self._channel.post(Kind.ABORTED, 0, True)

    # Messages.

    def _report(self, kind: Kind, total: Total | None, *, late: bool = False, fills: bool = False) -> _Report:
        """A message about a window, which is complete where the total is known."""
        known = total is not None
        steps, last = 0 if kind is Kind.IDLE else self._steps, self._last or self._all_last
        if known and (kind is not Kind.TOTAL or self._settings is None):
            self._settings = self.settings.number()
        settings = self._settings if known and self._settings is not None else 0.0
        return _Report(kind, steps, last, known, late, fills, self._engine.passes, settings, total or Total(0.0))

    def _meet(self, report: _Report) -> list[_Report]:
        """Send a message, and wait for every rank's."""
        self._send(report)
        return self._read()

    def _send(self, report: _Report) -> None:
        self._check_posted()
        self._sent = report.kind, self._channel.send(*report.numbers())

    def _read(self) -> list[_Report]:
        """Wait for every rank's answer to the message that was sent; what they say about a window's end is kept."""
        (kind, sent), self._sent = self._sent, None
        reports = [_Report.read(numbers) for numbers in self._channel.receive(sent)]
        kinds = [report.kind for report in reports]
        if self._last and Kind.ABORTED in kinds and {*kinds} <= {Kind.ABORTED, Kind.IDLE}:
            return reports  # a rank has left an epoch that is over here
        self._check_kinds(kinds, *(_CLOSING if kind in _CLOSING else (kind,)))
        lengths = [report.steps for report in reports]
        if len({*lengths} - {0}) > 1:
            raise WindowError(f"`steps` must be the same on every rank. Received: {by_rank(lengths)}.")
        if kind in _CLOSING and any(other in (Kind.WINDOW, Kind.FINISHED) for other in kinds):
            self._reports = reports
        return reports

    def _exchange(self, kind: Kind, *numbers: float) -> list[list[float]]:
        """Numbers of all ranks, behind one that says what they are about."""
        self._check_posted()
        messages = self._channel.exchange(kind, *numbers)
        self._check_kinds([Kind(int(numbers[0])) for numbers in messages], kind)
        return messages

    def _exchange_of_passes(self, *numbers: float) -> list[list[float]]:
        return self._exchange(Kind.FORWARD, *numbers)

    def _check_posted(self) -> None:
        for earlier in self._channel.posted():
            if not self._notified:
                self._check_kinds([Kind(int(numbers[0])) for numbers in earlier], Kind.ABORTED, Kind.IDLE)

    def _check_kinds(self, kinds: Sequence[Kind], *expected: Kind) -> None:
        """Raise if a rank is not where this one is."""
        if all(kind in expected for kind in kinds):
            return
        self._reports = self._reports or []  # this rank's message has met theirs: it needs no other one to leave
        for kind, error in _ELSEWHERE.items():
            found = [rank for rank, theirs in enumerate(kinds) if theirs is kind]
            if found:
                ranks = f"Rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
                raise WindowError(f"{ranks} {error} (Rank {self.rank} says this.)")
        raise WindowError(
            f"The ranks are at different places: {by_rank([kind.name for kind in kinds])}. Call step(), flush() and "
            "batches() in the same order on every rank."
        )


_SILENT = Listener()

_ELSEWHERE = {
    Kind.ABORTED: "left in the middle of an epoch, by an error or a break, while other ranks went on. Nothing was "
    "updated. Look at the error there; a `break` must come on all ranks at once.",
    Kind.ENDED: "came to the end of an epoch while other ranks went on. Nothing was updated. Ranks of a sharded model, "
    "and those on which several optimizers share batches, need the same number of batches: pad or drop some "
    "(DistributedSampler does). TrainStep, and one optimizer over DistributedDataParallel, take different numbers.",
    Kind.TOTAL: "changed a window's gradient or weight after its reduction had begun, by another backward pass or "
    "weight, and other ranks did not: they have made the update without it. Go on from a checkpoint. Run the backward "
    "passes of a micro-batch on all ranks, or as one: (loss + other_loss).backward().",
}
"""What a rank that is elsewhere has done."""


def _check_weighed(totals: Sequence[Total]) -> None:
    """Raise where some ranks weigh their micro-batches and others don't."""
    if any(total.equal for total in totals) and not all(total.equal or not total.weight for total in totals):
        ways = ["without a weight" if t.equal else "weighed" if t.weight else "none" for t in totals]
        raise WindowError(
            "Some ranks weigh their micro-batches, by batches() or backward(loss, weight=...), and others don't: "
            f"{by_rank(ways)}. Nothing was updated. Weigh them in the same way on every rank."
        )
