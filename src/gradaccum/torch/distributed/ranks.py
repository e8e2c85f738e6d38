"""Several devices: one window over all ranks, one reduction of the gradients per window.

Each rank sums its micro-batches in `p.grad`, in multiples of a unit that all ranks share; the model's own reduction
turns the sums into their mean over the ranks; dividing that gives the mean over all rows of all ranks:

    S_r = sum_i (w_ri / unit) g_ri      A = sum_r S_r / ranks      gradient = A / (W / (unit * ranks)),  W = sum w_ri

So ranks need not have the same rows, weights or numbers of micro-batches.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import after_backward
from gradaccum.torch.distributed.by_blocks import ByBlocks, ShardedByBlocks
from gradaccum.torch.distributed.channel import Channel, Kind
from gradaccum.torch.distributed.ddp import Replicas
from gradaccum.torch.distributed.fsdp import Shards
from gradaccum.torch.distributed.single_rank import Listener, RanOut, Settings, SingleRank, Total, by_rank
from gradaccum.torch.distributed.together import DIFFERENT_PASSES, Together

__all__ = ["Ranks"]


class Ranks(SingleRank):
    """The windows of all ranks, closed together.

    At a window's end every rank sends a message before the reduction, that it is about to take part: so a rank without
    micro-batches learns that the others go on, and one that is gone is missed before anybody waits in a reduction. What
    its part weighs is in it where the sum is finished by then; where a backward pass reduces, a second one says it.

    Args:
        engine: Makes what reduces the gradients. It takes three functions: to call when the forward pass of a closing
            micro-batch is done, when its backward pass starts, and when a sharded part's forward pass begins.
        parameters: The optimizers' parameters.
        settings: What they make of the gradient.
        steps: The length of every window, or None if it varies.
        options: What else must be the same on every rank, by name.
        manual_reduce: No backward pass may reduce, since the sum is finished only afterwards.
        always: Reduce on every micro-batch. Part of the sum is then the ranks' mean already; its mean over the ranks is
            itself, so nothing else changes.
    """

    is_distributed = True

    def __init__(
        self,
        engine: Callable[[Callable[[], None], Callable[[], None], Callable[[str], None]], Replicas | Shards],
        parameters: Sequence[Tensor],
        settings: Settings,
        *,
        steps: int | None = None,
        options: Mapping[str, Any] | None = None,
        manual_reduce: bool = False,
        always: bool = False,
    ) -> None:
        self._always = always
        self._listener: Callable[[], Listener | None] = lambda: None
        self._parameters, self.settings = list(parameters), settings
        self._engine = engine(self._forward_done, self._backward_starts, self._pass_begins)
        weakref.finalize(self, self._engine.remove).atexit = False
        self.sharded = self._engine.sharded
        if isinstance(self._engine, Shards):
            self._together = Together(self._engine, self._exchange_of_passes)
        try:
            self._channel = Channel(self._engine.members, self._engine.group)
            self._check_same(steps, options or {})
        except BaseException:
            self._engine.remove()
            raise
        self.size, self.rank = self._channel.size, self._channel.rank
        self.manual_reduce = manual_reduce or self._engine.manual_reduce
        self._closes = self._restored = self._uncounted = self._notified = False
        self._last = self._all_last = False  # whether this rank's epoch is over, and every rank's
        self._offered: Any = None  # a message that this rank has nothing, which not all have answered
        self._steps = 0
        self._restart()
        self._engine.hold(False, False)

    def attach(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)

    def _restart(self) -> None:
        self._announced = self._reducing = False
        self._versions: list[tuple[int, int]] | None = None  # of the gradients, when a backward pass had reduced them

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

    def agree_on_last(self, last: bool, repeatable: bool = True) -> bool:
        if not isinstance(self._engine, Shards):
            return last
        known = self._engine.next_micro_batch()
        messages = self._exchange(Kind.MICRO_BATCH, repeatable and known, last, self._engine.repeats)
        self._check_kinds(messages, Kind.MICRO_BATCH)
        lasts = [bool(numbers[2]) for numbers in messages]
        if len({*lasts}) > 1 or any(numbers[3] for numbers in messages):
            if not all(numbers[1] for numbers in messages):
                raise WindowError(
                    "A sharded model needs the same passes on every rank, and a rank whose batches are used up can "
                    "repeat its last micro-batch only if that has one backward pass, no GradScaler and no other "
                    f"optimizer's batches. The last one has come: {by_rank(lasts)}. Pad or drop batches "
                    "(DistributedSampler does), or use DistributedDataParallel."
                )
            if last:
                self._engine.keep()
            self._engine.compare()
        return all(lasts)

    def repeat(self) -> None:
        if isinstance(self._engine, Shards):
            self._engine.repeat()

    def scale(self, factor: float, idle: bool = False) -> None:
        self._engine.scale(factor, idle)

    def continue_window(self) -> None:
        if self._always and not self.manual_reduce and not self.reduced:
            self._announce(Kind.MICRO_BATCH)
            self._engine.reduce()
            self._engine.continues()
            self._reduction_done()

    def _pass_begins(self, part: str) -> None:
        self._together.collective_begins(part)

    def begin_passes(self) -> None:
        self._together.begin()

    def end_passes(self) -> None:
        self._together.end()

    def ran_out(self, cost: int, *, final: bool) -> RanOut:
        return self._together.ran_out(cost, final=final)

    @property
    def failure(self) -> RanOut | None:
        return self._together.failure

    def start_over(self) -> None:
        self._together.start_over()

    def by_blocks(self, model: nn.Module, blocks: Sequence[nn.Module]) -> ByBlocks:
        return ShardedByBlocks(self, self._engine, model, blocks) if isinstance(self._engine, Shards) else ByBlocks()

    def alone(self) -> contextlib.AbstractContextManager[dict[Tensor, torch.dtype]]:
        return self._together.shards.alone()

    def gathered_bytes(self, gradients: int) -> int:
        return self._together.shards.gathered_bytes(gradients)

    def _forward_done(self) -> None:
        if self._closes and (listener := self._listener()) is not None:
            listener.forward_done(self.loss_scale)

    def _backward_starts(self) -> None:
        if (listener := self._listener()) is not None:
            listener.backward_starts()
        if not (self._closes or self._always) or self.manual_reduce:
            return
        if not self._reducing:
            self._announce(Kind.WINDOW if self._closes else Kind.MICRO_BATCH)
            self._reducing = True
            after_backward(self._reduction_done)
        self._engine.starts()

    def _reduction_done(self) -> None:
        self._versions = self._current_versions()
        if (listener := self._listener()) is not None:
            listener.reduced()

    def _current_versions(self) -> list[tuple[int, int]]:
        return [(0, -1) if p.grad is None else (id(p.grad), p.grad._version) for p in self._parameters]

    # The window's sum.

    def clear(self) -> None:
        self._engine.clear()

    @property
    def pending(self) -> Callable[[], list[Tensor]]:
        return self._engine.pending

    @property
    def reduced(self) -> bool:
        return self._versions is not None

    def total(self, mine: Total) -> Total:
        # Sharded models reduce in every backward pass of this micro-batch.
        late = self._versions is not None and not self.sharded and self._versions != self._current_versions()
        messages, settings = list[list[float]](), self.settings.number()
        if not self._announced and self.sharded:
            self._announce(Kind.WINDOW)
        elif not self._announced and isinstance(self._engine, Replicas):
            seen = late, self._engine.will_fill, self._engine.passes
            messages = self._announce(Kind.FINISHED, *mine, *seen, settings)
        if self._versions is None:
            self._together.reduce() if self.sharded else self._engine.reduce()
        self._engine.prepare()
        self._restart()
        if not messages or any(numbers[0] != Kind.FINISHED for numbers in messages):
            seen = late, self._engine.filled, self._engine.passes
            messages = self._channel.exchange(Kind.TOTAL, 0, self._last or self._all_last, *mine, *seen, settings)
            self._check_kinds(messages, Kind.TOTAL)
        _, _, lasts, *totals, lates, filled, passes, numbers_of_settings = zip(*messages)
        weights, given, largest, scales, next_scales, overflows, equal, idle = totals
        if len({*passes}) > 1:
            self._engine.settle()
            raise WindowError(DIFFERENT_PASSES)
        if any(lates):
            # Another backward pass came after the one that reduced. Its gradients stand beside the mean over the ranks,
            # and the mean of that sum is right. From now on the reduction waits until step().
            self._engine.reduce()
            self.manual_reduce = True
        if any(filled) or any(lates):
            self._drop_unused()
        source = idle.index(False) if False in idle else 0
        self.buffers_from = source if any(idle) and not all(idle) else None
        self._engine.settle(source)
        self._restored = self._uncounted = False
        self._all_last = all(lasts)
        used = {scale for scale in scales if scale}
        # Where scales differ nevertheless, the sum is lost, as after an overflow.
        overflow = any(overflows) or len(used) > 1
        self.loss_scale = (min if overflow else max)([scale for scale in next_scales if scale], default=self.loss_scale)
        if any(equal) and not all(same or not weight for same, weight in zip(equal, weights)):
            ways = ["without a weight" if same else "weighed" if w else "none" for same, w in zip(equal, weights)]
            raise WindowError(
                "Some ranks weigh their micro-batches, by batches() or backward(loss, weight=...), and others don't: "
                f"{by_rank(ways)}. Nothing was updated. Weigh them in the same way on every rank."
            )
        if len({*numbers_of_settings}) > 1:
            self.settings.settle(self)
        return Total(sum(weights), any(given), max(largest), min(used, default=0.0), self.loss_scale, overflow)

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
        messages = self._exchange(Kind.NUMBER, number)
        self._check_kinds(messages, Kind.NUMBER)
        return [numbers[1] for numbers in messages]

    # Epochs.

    def end_epoch(self) -> None:
        self._last = True

    def others_continue(self, *, wait: bool = True) -> bool | None:
        while not self._all_last:
            if self._offered is None:
                self._offered = self._begin(Kind.IDLE)
            if not (wait or self._channel.arrived(self._offered)):
                return None
            messages, self._offered = self._hear(Kind.IDLE, self._offered), None
            if self._announced:
                return True
            self._all_last = all(numbers[2] for numbers in messages)
            if not self._last:
                break
        return False

    def begin_epoch(self) -> None:
        self._last = self._all_last = False
        if isinstance(self._engine, Shards):
            self._engine.forget()

    def abort(self, *, notified: bool = False) -> None:
        self._notified, self._offered = notified, None
        if self.sharded:
            self._together.abort()
        if not self._all_last and not self._announced:
            self._channel.post(Kind.ABORTED, 0, True)

    # Messages.

    def _exchange(self, kind: Kind, *numbers: float) -> list[list[float]]:
        self._check_posted()
        return self._channel.exchange(kind, *numbers)

    def _exchange_of_passes(self, *numbers: float) -> list[list[float]]:
        messages = self._exchange(Kind.FORWARD, *numbers)
        self._check_kinds(messages, Kind.FORWARD)
        return messages

    def _check_posted(self) -> None:
        for earlier in self._channel.posted():
            if not self._notified:
                self._check_kinds(earlier, Kind.ABORTED, Kind.IDLE)

    def _announce(self, kind: Kind, *total: float) -> list[list[float]]:
        """Say that a reduction is about to begin, and on which terms."""
        return self._hear(kind, self._begin(kind, *total))

    def _begin(self, kind: Kind, *total: float) -> Any:
        self._check_posted()
        steps = self._steps if kind is not Kind.IDLE else 0
        self._announced = kind in (Kind.WINDOW, Kind.FINISHED)
        return self._channel.send(kind, steps, self._last or (self._all_last and self._announced), *total)

    def _hear(self, kind: Kind, sent: Any) -> list[list[float]]:
        messages = self._channel.receive(sent)
        kinds = {numbers[0] for numbers in messages}
        if Kind.ABORTED in kinds and kinds <= {Kind.ABORTED, Kind.IDLE} and self._last:
            return messages
        self._check_kinds(messages, *((kind,) if kind is Kind.MICRO_BATCH else (Kind.WINDOW, Kind.FINISHED, Kind.IDLE)))
        lengths = [int(numbers[1]) for numbers in messages]
        if len({*lengths} - {0}) > 1:
            raise WindowError(f"`steps` must be the same on every rank. Received: {by_rank(lengths)}.")
        self._announced = not kinds.isdisjoint((Kind.WINDOW, Kind.FINISHED))
        return messages

    def _check_kinds(self, messages: list[list[float]], *expected: Kind) -> None:
        """Raise if a rank is not where this one is."""
        kinds = [Kind(int(numbers[0])) for numbers in messages]
        if all(kind in expected for kind in kinds):
            return
        left = [rank for rank, kind in enumerate(kinds) if kind is Kind.ABORTED]
        if left:
            self._announced = True  # this rank's message has met theirs: it needs no other one to leave
            raise WindowError(
                f"Rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} left in the middle of an epoch, by an error "
                "or a break, while other ranks went on. Nothing was updated. Look at the error there; a `break` must "
                f"come on all ranks at once. (Rank {self._channel.rank} says this.)"
            )
        raise WindowError(
            f"The ranks are at different places: {by_rank([kind.name for kind in kinds])}. Call step(), flush() and "
            "batches() in the same order on every rank."
        )
