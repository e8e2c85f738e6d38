"""The windows of one optimizer, one after the other: how long each is, when it closes, and its update."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.noise import NoiseSchedule
from gradaccum.errors import WindowError
from gradaccum.on_torch.noise import inside_step
from gradaccum.schedule import Schedule
from gradaccum.torch.guard import ParameterGroups, parameters_of
from gradaccum.torch.optimizer.accumulation import Accumulation
from gradaccum.torch.optimizer.rows import RowsBeside
from gradaccum.torch.optimizer.sharded_checkpoint import release

__all__ = ["Windows", "let_go"]

logger = logging.getLogger("gradaccum")


class Windows:
    """Counts micro-batches into windows, and makes an update of each.

    Args:
        inner: The inner optimizer.
        schedule: How long the windows are.
        accumulation: The open window, with its gradients.
        step: The wrapper's method that steps the inner optimizer; it does not keep the wrapper alive.
        check_steps: Raises if windows of this schedule cannot be.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        accumulation: Accumulation,
        step: weakref.WeakMethod[Callable[..., Any]],
        check_steps: Callable[[Schedule], None],
    ) -> None:
        self.inner = inner
        self.schedule = schedule
        self.accumulation = accumulation
        self.ranks = accumulation.ranks
        self.epoch = 0
        self.updates = 0
        self.updated = False
        self.in_epoch = False
        """Whether this epoch has a micro-batch."""
        self.restored = False
        """Whether the open window came from a checkpoint, and no loop of `batches()` has continued it yet."""
        self._source: object | None = None
        self.after_loop = False
        """Whether a loop of `batches()` is over here, and windows of its epoch still close."""
        self.left_over: object | None = None
        """What a loop of `batches()` over an iterator had fetched ahead when it was broken off."""
        self._step, self._check_steps = step, check_steps
        self._scheduled_for: tuple[int, int] | None = None
        self.noise_schedule = NoiseSchedule.of(schedule)
        self.groups = ParameterGroups(inner)
        self.fetched_ahead = False
        """Whether a loop of `batches()` is over whose first batch had no step."""
        self._rows_beside = RowsBeside(accumulation.window)
        self._said: set[str] = set()
        self._told_of_schedule = False
        self.expect_next()

    def parameters(self) -> list[Tensor]:
        """The inner optimizer's, in the order of its groups."""
        return parameters_of(self.inner)

    def parameters_added(self) -> None:
        """Parameters have joined the inner optimizer on purpose: their part of an open window's sum starts here."""
        self.groups.note_parameters()
        self.accumulation.parameters_added()

    # How long they are.

    @property
    def steps(self) -> int:
        """Micro-batches of the open window, or of the next one."""
        window = self.accumulation.window
        if not window.is_open:
            self._settle_steps()
        return window.steps

    def reschedule(self, schedule: Schedule) -> None:
        """Another schedule, from the next window on.

        Raises:
            WindowError: A window of another length is open.
        """
        self._check_steps(schedule)
        self.accumulation.window.resize(schedule(self.epoch, self.updates))
        self.schedule, self._scheduled_for = schedule, (self.epoch, self.updates)
        self.noise_schedule = NoiseSchedule.of(schedule)
        self.expect_next()

    def _settle_steps(self) -> None:
        """Have the empty window as long as the schedule says."""
        at, constant = (self.epoch, self.updates), self.schedule.constant
        if constant is not None and constant == self.accumulation.window.steps:
            self._scheduled_for = at  # next to always
        elif self._scheduled_for != at:
            steps = self.schedule(*at)
            if self.schedule.largest is None:
                self._check_steps(Schedule(steps))
            self.accumulation.window.resize(steps)
            self._scheduled_for = at

    @property
    def closes_next(self) -> bool:
        """Whether the next micro-batch closes its window."""
        return self.steps == 1 or self.accumulation.window.closes_next

    def expect_next(self, counts: bool = True) -> None:
        """Say what comes next, one micro-batch ahead: DDP looks at it in the forward pass."""
        if self.ranks.is_distributed:
            self.ranks.expect(self.closes_next, self.steps, self.accumulation.window.micro_batch.last, counts)

    @property
    def source(self) -> object | None:
        """The `Batches` whose loop is running."""
        return self._source

    @source.setter
    def source(self, source: object | None) -> None:
        self._source, self.after_loop = source, False
        self._rows_beside.tell(source is not None)

    # Micro-batches.

    def count(self, scaled: Sequence[Any] = ()) -> None:
        """A micro-batch is in; with the one that closes the window, make the update.

        Args:
            scaled: Under a GradScaler, its live scale (None after `unscale_`) and whether it found an overflow.

        Raises:
            WindowError: The batch of `batches()` in use is counted already; or the sum was edited from outside.
        """
        accumulation = self.accumulation
        window, guard = accumulation.window, accumulation.guard
        one = window.micro_batch
        if one.in_batches and not one.announced:
            raise _counted_twice_error()
        if self.fetched_ahead and not one.in_batches:
            raise _fetched_ahead_error()
        if not window.weights:
            self._settle_steps()
            if self.groups.note():
                accumulation.parameters_added()
            guard.window_begins()
        else:
            self.groups.check_lists()
        untouched = guard.untouched
        if not (untouched and guard.arrivals) and self.schedule.constant != 1 and not self.ranks.sharded:
            self._check_micro_batch(accumulation)
        closes = accumulation.add(scaled, untouched)
        if not one.in_batches and self._rows_beside.any:
            self._rows_beside.look()
        self.in_epoch, self.updated = True, False
        if closes:
            self.updated = self._update()
        if self.ranks.is_distributed:
            if not closes:
                self.ranks.continue_window()
            self.expect_next()

    def _check_micro_batch(self, accumulation: Accumulation) -> None:
        """Say, once, what is no error and may be none of the large batch's."""
        guard, one = accumulation.guard, accumulation.window.micro_batch
        if guard.parameters_changed:
            self._say(
                "Parameters were changed inside an open window, by another optimizer's step, by clamping or loading, "
                "perhaps. The gradients of its micro-batches belong to different ones. Change parameters when "
                "`updated` is True."
            )
        if one.weight != 0 and guard.idle and accumulation.sums.detached is None:
            self._say(
                "step() counts a micro-batch whose loss reached none of the parameters, or that had no backward pass: "
                "its rows count, with a gradient of zero. To leave them out, leave out its step(), or use "
                "backward(loss, weight=0)."
            )

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(what)

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """A window of one micro-batch that the inner optimizer evaluates by itself, as often as it likes."""
        assert self.steps == 1
        result = step()
        self.accumulation.close()
        self.in_epoch = self.updated = True
        self.updates += 1
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the gradients between windows; inside an open window, do nothing."""
        accumulation = self.accumulation
        if not accumulation.window.weights:
            accumulation.empty(set_to_none)
            return
        accumulation.check_untouched()
        if accumulation.guard.compares:
            accumulation.guard.tampering()

    def flush(self) -> bool:
        """Close the open window now; outside of `batches()` this ends the epoch. Returns whether it made an update."""
        accumulation = self.accumulation
        accumulation.check_failed()
        ends_epoch = self.source is None
        if ends_epoch:
            self.ranks.end_epoch()
        self.updated = False
        if accumulation.window.is_open:
            accumulation.skip()
            accumulation.check_sum()
            self.updated = self._update()
            accumulation.empty()  # the loop's own zero_grad() is not to be relied on here: it may come before step()
        elif not ends_epoch:
            self.keep_up(once=True)
        if ends_epoch:
            self.keep_up()
            self._next_epoch()
        self.expect_next()
        return self.updated

    def discard(self) -> None:
        """Drop the open window without an update, with a line in the log."""
        window = self.accumulation.window
        if window.is_open:
            logger.warning("Discarding an open window of %d of %d micro-batches", window.micro_batches, window.steps)
        self.fetched_ahead = False
        self.accumulation.begin()
        self.accumulation.empty()
        self.expect_next()

    def let_go(self) -> None:
        """The optimizer is gone."""
        window = self.accumulation.window
        if window.is_open:
            logger.warning(
                "An optimizer is gone whose open window held %d of %d micro-batches, which make no update: flush() at "
                "an epoch's end would have made it",
                window.micro_batches,
                window.steps,
            )
        self.accumulation.remove()

    def end_epoch(self) -> None:
        """The loop of `batches()` is over."""
        self.source = None
        self.accumulation.expect_nothing()
        self._next_epoch()
        self.expect_next()

    def _next_epoch(self) -> None:
        self.epoch += self.in_epoch
        self.in_epoch = False
        self.ranks.begin_epoch()

    def keep_up(self, once: bool = False) -> None:
        """Take part in the windows that other ranks still make in this epoch, and in their updates."""
        while self.ranks.others_continue():
            self.take_part()
            if once:
                break

    def take_part(self) -> None:
        """Make the update of a window that other ranks close."""
        self.in_epoch = True
        self.accumulation.empty()
        self.updated = self._update() or self.updated
        self.accumulation.empty()

    # The update.

    def _update(self) -> bool:
        if self.accumulation.window.is_open:
            self.groups.check_parameters()
            self.groups.check_settings()
        try:
            if not self.accumulation.finish():
                return False
            release(self.inner)
            step = self._step()
            assert step is not None, "the wrapper is gone"
            step()
        finally:
            self.accumulation.close()
        self.updates += 1
        if self.noise_schedule is not None and self.noise_schedule.due():
            assert self.accumulation.noise is not None
            scale = self.accumulation.noise.estimate()
            votes = self.ranks.sum_number(self.noise_schedule.vote(scale))  # each rank measures for itself
            self.noise_schedule.move(scale, int(2 * votes / self.ranks.size))
        return True

    def rates(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the inner optimizer has the hyperparameters of a window of this length."""
        followed = self.noise_schedule
        if followed is None or followed.learning_rate_factor == 1.0:
            return contextlib.nullcontext()
        return inside_step(self.inner, followed.scaled(self.inner.param_groups))

    def may_have_missed(self) -> None:
        """Updates came after the loop's body: say so where a learning-rate schedule may be stepped there."""
        wrapper: Any = getattr(self._step(), "__self__", None)
        if hasattr(getattr(wrapper, "step", None), "_wrapped_by_lr_sched") and not wrapper._optimizer_step_post_hooks:
            self.tell_of_schedule()

    def tell_of_schedule(self) -> None:
        """Say, once, that a learning-rate schedule has missed an update."""
        if not self._told_of_schedule:
            self._told_of_schedule = True
            logger.warning(
                "An update was made after the loop, as its last batch was skipped or other ranks had more: where "
                "`if optimizer.updated: scheduler.step()` does not see it. A hook does: "
                "optimizer.register_step_post_hook(lambda *_: scheduler.step())."
            )

    # Files.

    def state_dict(self) -> dict[str, Any]:
        """How far training has come."""
        state: dict[str, Any] = {"epoch": self.epoch, "updates": self.updates, "in_epoch": self.in_epoch}
        if self.noise_schedule is not None and self.accumulation.noise is not None:
            state["noise_schedule"] = self.noise_schedule.state_dict()
            state["noise"] = self.accumulation.noise.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` wrote, with the open window that `accumulation` has."""
        self.epoch, self.updates, self.in_epoch = state["epoch"], state["updates"], state["in_epoch"]
        self.source, self.updated = None, False
        followed = state.get("noise_schedule")
        if followed and self.noise_schedule is not None and self.accumulation.noise is not None:
            self.noise_schedule.load_state_dict(followed)
            self.accumulation.noise.load_state_dict(state["noise"])
        self.restored = self.accumulation.window.is_open
        self._scheduled_for = (self.epoch, self.updates) if self.restored else None
        if self.restored:
            self.groups.note()
        self.expect_next()


def let_go(windows: Windows) -> None:
    """The optimizer is gone: if in the middle of a window, or of a loop of `batches()`, an error has ended its loop."""
    if windows.accumulation.window.is_open or windows.source is not None:
        windows.ranks.abort()
    windows.let_go()


def _counted_twice_error() -> WindowError:
    """A batch of `batches()` has come to two steps."""
    return WindowError(
        "step() was called twice for one batch of batches(), which weighs a batch by its rows and closes the epoch's "
        "last window with its last batch. Call step() once per batch; to split a batch further, or to use it several "
        "times, loop over the loader itself and call flush() at the epoch's end. discard() drops the window."
    )


def _fetched_ahead_error() -> WindowError:
    """Batches of `batches()` are trained on after the loop."""
    return WindowError(
        "step() came after the loop of batches() was over, whose first batch had none: something around batches() "
        "fetches ahead, list() or a prefetcher perhaps, or is another loop over the same optimizer's batches(), so "
        "batches were weighed by others' rows. Put batches() around it: optimizer.batches(prefetched(loader)); and "
        "have one such loop at a time. discard() forgets that loop."
    )
