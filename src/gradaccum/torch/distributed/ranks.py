"""Several devices: one window over all ranks, one reduction of the gradients per window.

Each rank sums its micro-batches in `p.grad`, in multiples of a unit that all ranks share; the model's own reduction
makes of it the mean over the ranks; and the divisor makes of that the mean over all rows of all ranks:

    S_r = sum_i (w_ri / unit) g_ri      A = sum_r S_r / ranks      gradient = A / (W / (unit * ranks)),  W = sum w_ri

So ranks need not have the same rows, weights or numbers of micro-batches.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.distributed.channel import Channel, Message
from gradaccum.torch.distributed.ddp import Replicas
from gradaccum.torch.distributed.fsdp import Shards
from gradaccum.torch.distributed.single_rank import Listener, SingleRank, Total

__all__ = ["Ranks"]


class _Round(enum.IntEnum):
    """What a message is about."""

    WINDOW = 1
    """A window is about to be reduced, and this rank takes part."""
    NOTHING = 2
    """This rank has nothing to reduce, and takes part if others have."""
    LEFT = 3
    """This rank has dropped out."""
    TOTAL = 4
    """The reduction is done; what the window weighs."""
    AGAIN = 8
    """Another backward pass came after the one that reduced."""
    STEPS = 5
    """At the start: how long the windows are."""
    NUMBER = 7
    """Something to add up over the ranks."""
    MICRO_BATCH = 6
    """An open window is about to be reduced as far as it has come, and goes on."""


class Ranks(SingleRank):
    """The windows of all ranks, closed together.

    At a window's end every rank says that it is about to reduce, before it does so: a rank that has no more
    micro-batches learns from it that the others have, and one that is gone is missed before anybody waits in a
    reduction. It also says what its part weighs, as far as that is known: in the first window, and with a GradScaler,
    that takes a second message when the reduction is done.

    A backward pass that comes after the one that reduced is noticed in the first window, and later reductions wait for
    step(). One that comes later on, for the first time, must come on all ranks.

    Args:
        engine: Makes what reduces the gradients, from what it shall call when the forward pass of a closing micro-batch
            is done, and when its backward pass starts.
        parameters: The optimizer's parameters.
        steps: The length of every window, or None if it varies.
        by_hand: No backward pass may reduce, since the sum is finished only afterwards.
        always: Reduce on every micro-batch. The mean over the ranks of a sum that is in part their mean already is the
            right one, so nothing else changes.
    """

    several = True

    def __init__(
        self,
        engine: Callable[[Callable[[], None], Callable[[], None]], Replicas | Shards],
        parameters: Sequence[Tensor],
        *,
        steps: int | None = None,
        by_hand: bool = False,
        always: bool = False,
    ) -> None:
        self._always = always
        self._listener: Callable[[], Listener | None] = lambda: None
        self._parameters = list(parameters)
        self._engine = engine(self._forward_done, self._backward_starts)
        self.in_step = self._engine.in_step
        self._channel = Channel(self._engine.members, getattr(self._engine, "group", None))
        self.size, self.rank = self._channel.size, self._channel.rank
        self.by_hand = by_hand or self._engine.by_hand
        self._closes = self._last = self._over = self._restored = self._known = False
        self._steps = 0
        self._restart()
        self._engine.hold(False, False)
        self._check_steps(steps)

    def attach(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)

    def _restart(self) -> None:
        self._announced = self._reducing = False
        self._message: Message | None = None
        self._promised: Total | None = None
        self._totals: list[list[float]] | None = None
        self._versions: list[tuple[int, int]] | None = None

    def _check_steps(self, steps: int | None) -> None:
        said = self._channel.exchange(_Round.STEPS, steps or 0)
        lengths = [int(numbers[1]) for numbers in said]
        if len({*lengths}) > 1:
            raise ValueError(f"`steps` must be the same on every rank. Received: {_by_rank(lengths)}.")

    # The micro-batch that closes the window.

    def expect(self, closes: bool, steps: int, last: bool = False, counts: bool = True) -> None:
        self._closes, self._steps, self._last = closes, steps, last
        self._restart()
        waits = self.by_hand or self._restored or not (counts or self.in_step)
        self._engine.hold(closes and not waits, self._always and not waits)

    def meet(self, last: bool, repeatable: bool = True) -> bool:
        if not isinstance(self._engine, Shards):
            return last
        known = self._engine.next_micro_batch()
        said = self._exchange(_Round.MICRO_BATCH, repeatable and known, last)
        self._check_present(said, _Round.MICRO_BATCH)
        lasts = [bool(numbers[2]) for numbers in said]
        if len({*lasts}) > 1:
            if not all(numbers[1] for numbers in said):
                raise WindowError(
                    "A sharded model needs the same passes on every rank, and a rank whose batches are used up can "
                    "repeat its last micro-batch only if that has one backward pass, no GradScaler and no other "
                    f"optimizer's batches. The last one has come: {_by_rank(lasts)}. Pad or drop batches "
                    "(DistributedSampler does), or use DistributedDataParallel."
                )
            if last:
                self._engine.keep()
        return all(lasts)

    def repeat(self) -> None:
        if isinstance(self._engine, Shards):
            self._engine.repeat()

    def most(self, passes: int) -> int:
        if not self.in_step:
            return passes
        said = self._exchange(_Round.NUMBER, passes)
        self._check_present(said, _Round.NUMBER)
        return max(int(numbers[1]) for numbers in said)

    def scale(self, factor: float) -> None:
        self._engine.scale(factor)

    def clear(self) -> None:
        self._engine.clear()

    @property
    def pending(self) -> Callable[[], list[Tensor]]:
        return self._engine.pending

    @property
    def reduced(self) -> bool:
        return self._versions is not None

    def _forward_done(self) -> None:
        listener = self._listener()
        if self._closes and listener is not None:
            listener.forward_done(self.loss_scale)

    def _backward_starts(self) -> None:
        listener = self._listener()
        if listener is not None:
            listener.backward_starts()
        if not (self._closes or self._always) or self.by_hand:
            return
        if not self._reducing:
            self._promised = listener.foreseen() if listener and self._closes and self._known else None
            self._say(_Round.WINDOW if self._closes else _Round.MICRO_BATCH, self._promised)
            self._reducing = True
            if not self._engine.before_reducing(self._hear):
                self._hear()
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._reduction_done))  # after the reducer's own, which is queued later
        self._engine.starts()

    def _reduction_done(self) -> None:
        self._hear()
        self._versions = self._seen()
        listener = self._listener()
        if listener is not None:
            listener.reduced()

    def _seen(self) -> list[tuple[int, int]]:
        return [(0, -1) if p.grad is None else (id(p.grad), p.grad._version) for p in self._parameters]

    # The window's end.

    def total(self, mine: Total) -> Total:
        if not self._announced:
            self._promised = mine
            self._announce(_Round.WINDOW, mine)
        # Sharded models reduce in every backward pass of this micro-batch.
        late = self._versions is not None and not self.in_step and self._versions != self._seen()
        totals, broken = self._totals, self._promised is not None and (late or self._promised != mine)
        if self._versions is None:
            self._engine.reduce()
        self._restart()
        if totals is None or broken:
            about = _Round.TOTAL if totals is None else _Round.AGAIN
            said = self._channel.exchange(about, 0, self._last or self._over, *mine, late, True)
            self._check_present(said, about)
            totals = said
        _, _, lasts, weights, given, largest, scales, wishes, overflows, lates, _ = zip(*totals)
        if any(lates):
            # Another backward pass came after the one that reduced. Its gradients stand beside the mean over the ranks,
            # and the mean of that sum is right. From now on the reduction waits until step().
            self._engine.reduce()
            self.by_hand = True
        self._engine.settle()
        self._restored, self._known = False, True
        self._over = all(lasts)
        used = {scale for scale in scales if scale}
        # Where scales differ nevertheless, the sum is lost, as after an overflow.
        overflow = any(overflows) or len(used) > 1
        self.loss_scale = (min if overflow else max)([wish for wish in wishes if wish], default=self.loss_scale)
        return Total(sum(weights), any(given), max(largest), min(used, default=0.0), self.loss_scale, overflow)

    def sum(self, tensor: Tensor) -> Tensor:
        return self._engine.sum(tensor)

    def add_up(self, number: float) -> float:
        said = self._exchange(_Round.NUMBER, number)
        self._check_present(said, _Round.NUMBER)
        return sum(numbers[1] for numbers in said)

    def everybody(self, mine: Any) -> list[Any]:
        return self._channel.gather(mine)

    def gather(self) -> None:
        # The mean over the ranks of a part of the sum; what comes is added to it, and the mean of that is right.
        self._engine.reduce()

    def restored(self) -> None:
        self._restored = not self.in_step

    def end(self) -> None:
        self._last = True

    def goes_on(self) -> None:
        if self._always and not self.by_hand and not self.reduced:
            self._announce(_Round.MICRO_BATCH)
            self._engine.reduce()
            self._reduction_done()

    def others_go_on(self) -> bool:
        while not self._over:
            said = self._announce(_Round.NOTHING)
            if self._announced:
                return True
            self._over = all(numbers[2] for numbers in said)
            if not self._last:
                break
        return False

    def begin(self) -> None:
        self._last = self._over = False
        if isinstance(self._engine, Shards):
            self._engine.forget()

    def leave(self) -> None:
        if not self._over and not self._announced:
            self._channel.post(_Round.LEFT, 0, True)

    # Messages.

    def _exchange(self, about: _Round, *numbers: float) -> list[list[float]]:
        for earlier in self._channel.posted():
            self._check_present(earlier, _Round.LEFT, _Round.NOTHING)
        return self._channel.exchange(about, *numbers)

    def _announce(self, about: _Round, total: Total | None = None) -> list[list[float]]:
        self._say(about, total)
        return self._hear()

    def _say(self, about: _Round, total: Total | None = None) -> None:
        for earlier in self._channel.posted():
            self._check_present(earlier, _Round.LEFT, _Round.NOTHING)
        steps = self._steps if about is not _Round.NOTHING else 0
        known = total is not None or about is _Round.NOTHING  # nothing weighs nothing
        last = self._last or (self._over and about is _Round.WINDOW)
        self._about = about
        self._message = self._channel.say(about, steps, last, *(total or Total(0.0)), False, known)
        self._announced = about is _Round.WINDOW

    def _hear(self) -> list[list[float]]:
        """What all ranks have said in the round that this one has begun; nothing, where that was heard before."""
        message, self._message = self._message, None
        if message is None:
            return []
        said = self._channel.hear(message)
        kinds = {numbers[0] for numbers in said}
        if _Round.LEFT in kinds and kinds <= {_Round.LEFT, _Round.NOTHING} and self._last:
            return said
        sharded = self._about is _Round.MICRO_BATCH
        self._check_present(said, *((_Round.MICRO_BATCH,) if sharded else (_Round.WINDOW, _Round.NOTHING)))
        steps = [int(numbers[1]) for numbers in said]
        if len({*steps} - {0}) > 1:
            raise WindowError(f"`steps` must be the same on every rank. Received: {_by_rank(steps)}.")
        self._announced = _Round.WINDOW in kinds
        self._totals = said if all(numbers[-1] for numbers in said) else None
        return said

    def _check_present(self, said: list[list[float]], *expected: _Round) -> None:
        """Raise if a rank is not where this one is."""
        others = {rank: _Round(int(numbers[0])) for rank, numbers in enumerate(said)}
        if all(kind in expected for kind in others.values()):
            return
        left = [rank for rank, kind in others.items() if kind is _Round.LEFT]
        if left:
            raise WindowError(
                f"Rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} left in the middle of an epoch, by an error "
                "or a break, while other ranks went on. Nothing was updated. Look at the error there; a `break` must "
                f"come on all ranks at once. (Rank {self._channel.rank} says this.)"
            )
        raise WindowError(
            f"The ranks are at different places: {_by_rank([kind.name for kind in others.values()])}. Call step(), "
            "flush() and batches() in the same order on every rank; and where a micro-batch that closes a window has "
            "several backward passes, have them on all ranks, or in the first window already."
        )


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
