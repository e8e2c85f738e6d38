"""The windows of one optimizer, one after the other: how long each is, when it closes, and its update.

Who fills them: the user's loop (PLAIN), or one of `batches()` (LOOP), whose epoch they are then of.

    phase     what it means                                      goes to
    PLAIN     no loop of `batches()` runs                        LOOP when one begins
    RESTORED  PLAIN, in the middle of a checkpoint's window      LOOP, which continues that window
    LOOP      a loop of `batches()` runs: `source`               PLAIN; AHEAD where its first batch had no `step()`
    AHEAD     something has fetched ahead of the loop            LOOP; PLAIN by `discard()`. `step()` is an error

In LOOP, a batch that has been handed out may be counted once: `MicroBatch.announced`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.schedule import Schedule
from gradaccum.torch.watch import ParameterMonitor, parameters_of
from gradaccum.torch.window.gradient_window import GradientWindow

logger = logging.getLogger("gradaccum")

WRITTEN = (
    "Parameters were changed inside an open window, by another optimizer's step, by clamping or by loading, perhaps. "
    "The window's gradients were computed at different parameter values. Change parameters when `updated` is True."
)

_Phase = enum.Enum("_Phase", ["PLAIN", "RESTORED", "LOOP", "AHEAD"])


class Windows:
    """On one device. On several ranks, it is a `RanksWindows`."""

    ranks: Any = None
    may_have_none = False
    """Whether an epoch may have no batch here, as other ranks have some."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        current: GradientWindow,
        wrapper: Callable[[], Any],
        check_steps: Callable[[Schedule], None],
    ) -> None:
        self.inner, self.current = inner, current
        self.window, self.passes, self.one = current.window, current.passes, current.window.micro_batch
        self.epoch = self.updates = 0
        self.updated = self.in_epoch = False  # in_epoch: this epoch has a micro-batch
        self._phase = _Phase.PLAIN
        self.source: Any = None  # the `Batches` whose loop runs
        self._interrupted: Any = None  # the loop in which a checkpoint was loaded, which may go on
        self.left_over: Any = None  # what a loop over an iterator had fetched ahead when it was broken off
        self._first_unused: bool | None = None  # the loop's first batch had no `step()`; None while it is in use
        self._updates_in_loop = 0
        self.expected: float | None = None  # what the last batch weighed, of the loop that runs
        self.before_update: Callable[[], None] | None = None  # a checkpoint may have reserved room in the state
        self._wrapper, self._check_steps = wrapper, check_steps
        self.parameter_monitor = ParameterMonitor(inner)
        self._warned: set[str] = set()
        self._follow(schedule, None)

    def parameters(self) -> list[Tensor]:
        return parameters_of(self.inner)

    def parameters_added(self) -> None:
        """Parameters have joined the inner optimizer on purpose: their part of an open window's sum starts here."""
        self.parameter_monitor.note_parameters()
        self.current.parameters_added()
        if not (self.window.is_open or self.passes.arrivals):
            self.current.monitor.restart(closed=True)  # what gradients they have is of no window

    # How long they are.

    def _follow(self, schedule: Schedule, scheduled_for: tuple[int, int] | None) -> None:
        self.schedule, self._scheduled_for = schedule, scheduled_for
        self.expect_next()

    def reschedule(self, schedule: Schedule) -> None:
        self._check_steps(schedule)
        self.window.resize(schedule(self.epoch, self.updates))
        self._follow(schedule, (self.epoch, self.updates))

    @property
    def steps(self) -> int:
        at = self.epoch, self.updates
        if not self.window.micro_batches and self._scheduled_for != at:
            steps = self.schedule(*at)
            if self.schedule.largest is None:
                self._check_steps(Schedule(steps))
            self.window.resize(steps)
            self._scheduled_for = at
        return self.window.steps

    @property
    def closes_next(self) -> bool:
        return self.steps == 1 or self.window.closes_next

    def expect_next(self, counts: bool = True) -> None:
        """Say what comes next, one micro-batch ahead."""

    # Micro-batches.

    def count_ordinary(self) -> bool:
        """`count`, in a window whose micro-batches so far had nothing to look at. Returns whether this one had none."""
        window, passes, one = self.window, self.passes, self.one
        mixed = one.factor != 1.0 and passes.arrivals != one.weighed
        closes = window.micro_batches + 1 >= window.steps or one.last
        elsewhere = one.in_batches is not one.announced
        if mixed or elsewhere or not (passes.open or self._begins_ordinary()):
            self.count()
            return False
        if closes and (passes.unfinished or not self.current.monitor.untouched):
            self.current.check_sum()
        passes.arrivals = 0
        if window.add():
            self.updated = self.update()
        return True

    def _begins_ordinary(self) -> bool:
        """Whether this micro-batch begins a window, and may be counted without a look."""
        if self.window.steps != self.schedule.constant or not self.parameter_monitor.same_lists():
            return False
        self.current.begin_ordinary()
        self.in_epoch, self.updated = True, False
        return True

    def count(self, scaled: Sequence[Any] = ()) -> None:
        current, window, one = self.current, self.window, self.one
        if one.in_batches is not one.announced or self._phase is _Phase.AHEAD:
            self._check_place()
        looking = current.monitor.looking
        if not window.micro_batches:
            if window.steps != self.schedule.constant:
                _ = self.steps
            if self.parameter_monitor.window_begins(looking):
                current.parameters_added()
                looking = True
        if looking:
            if self.schedule.constant != 1:
                self._check_micro_batch()
            if max(current.monitor.passes_of_each, default=0) > 1:
                self.several_passes()
        closes = current.count(scaled)
        self.in_epoch, self.updated = True, False
        if closes:
            self.updated = self.update()
        self.expect_next()

    def _check_place(self) -> None:
        """Raise if this `step()` belongs to no batch of the loop of `batches()`."""
        if not self.one.in_batches:
            raise WindowError(
                "step() was called after the loop over batches() had ended, and the loop's first batch had no step(). "
                "Something around batches() fetches ahead (list(), a prefetcher, another loop over the same "
                "optimizer's batches()), so micro-batches were weighed by the rows of others. Put batches() around it, "
                "optimizer.batches(prefetched(loader)), and run one such loop at a time. discard() forgets the loop."
            )
        if not self.one.announced:
            raise WindowError(
                "step() was called twice for one batch of batches(), which weighs a batch by its rows and closes the "
                "last window with the epoch's last batch. Call step() once per batch. To split a batch further, or to "
                "use it more than once, loop over the loader itself and call flush() at the epoch's end. discard() "
                "drops the window."
            )

    def several_passes(self) -> None:
        """Several backward passes reached this micro-batch, in a window that looks."""

    def _check_micro_batch(self) -> None:
        """In windows 1, 2, 4, 8, ...: raise if parameters came or went; say what is no error and may be wrong."""
        if self.window.micro_batches:
            self.parameter_monitor.check_lists()
        else:
            self._wrapper()._check_batch_norm()  # a model is given in evaluation mode, or gets a layer later
        self.parameter_monitor.check_hooks()
        if self.parameter_monitor.written():
            self._warn_once(WRITTEN)
        if self.current.in_progress[0] and self.current.monitor.idle:
            self._warn_once(
                "step() counted a micro-batch whose loss reached none of the parameters, or that had no backward pass. "
                "Its rows count with a gradient of zero. To exclude them, skip its step() or call "
                "backward(loss, weight=0)."
            )
        self.current.monitor.warn_of_several_passes(self.window.steps)

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what)

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """A window of one micro-batch that the inner optimizer evaluates by itself, as often as it likes."""
        assert self.steps == 1
        result = step()
        self.current.close()
        self.in_epoch = self.updated = True
        self.updates += 1
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        current = self.current
        current.set_to_none = set_to_none
        if not self.window.micro_batches:
            current.empty()
        else:
            current.check_untouched()
            current.monitor.modification()
            current.loss_scale.bring()

    def flush(self) -> bool:
        """Close the open window now; outside of `batches()` this ends the epoch. Returns whether it made an update."""
        self.current.check_failed()
        self.updated = False
        self.close_early()
        if self.source is None:
            self.next_epoch()
        self.expect_next()
        return self.updated

    def close_early(self) -> None:
        """Close the window with what it holds, if that is anything."""
        current = self.current
        if self.window.micro_batches:
            current.skip()
            current.check_sum()
            self.updated = self.update()
            current.empty()  # the loop's own zero_grad() is not to be relied on here: it may come before step()

    def discard(self) -> None:
        """Drop the open window without an update. A line in the log says so, unless a checkpoint holds the window."""
        current, window = self.current, self.window
        if window.micro_batches and not current.saved:
            logger.warning("Discarding an open window of %d of %d micro-batches", window.micro_batches, window.steps)
        if self._phase is _Phase.AHEAD:
            self._phase = _Phase.PLAIN
        current.begin()
        current.be_special()
        current.empty()
        current.losses.restart()  # what it had belongs to no update
        self.expect_next()

    # A loop of `batches()`: begin_loop, then for each batch expect_batch and end_batch, then end_loop and end_epoch.

    def begin_loop(self, source: Any, resumed: bool) -> None:
        before, phase = self.source, self._phase
        self.source, self._phase, self._first_unused, self._interrupted = None, _Phase.PLAIN, None, None
        if phase is not _Phase.RESTORED and not resumed:
            if before is None:
                self.flush()  # left over by a plain loop; the window ends with its epoch
            elif not before.goes_on_in(source):
                self.discard()  # the loop before was left by an exception, and this one starts over
        self._set_source(source)

    def _set_source(self, source: Any, phase: _Phase = _Phase.PLAIN) -> None:
        self.source, self._phase, self.expected = source, phase if source is None else _Phase.LOOP, None
        self.passes.ordinary = False

    def expect_batch(self, weight: float, given: bool, last: bool) -> None:
        if weight == self.expected and weight and self.passes.ordinary:
            self.one.announced, self.one.last = True, last
            return
        self.expected = weight
        self.current.expect(weight, given, last)
        self.expect_next(counts=weight > 0)

    def go_on_in(self, source: Any) -> None:
        """This loop goes on: it is the one that runs, if a checkpoint was loaded in its body."""
        if self._interrupted is source:
            self._interrupted = None
            self._set_source(source)

    def end_batch(self) -> None:
        if self._first_unused is None:
            self._first_unused = self.one.announced
        self.current.skip()

    def end_loop(self) -> None:
        """It has used its last batch; `end_epoch` follows."""
        self._updates_in_loop = self.updates
        if self.window.micro_batches:
            self.flush()  # the last micro-batch was skipped

    def end_epoch(self) -> bool:
        """The epoch is over on all ranks. Returns whether it had a batch on any."""
        in_epoch = self.in_epoch
        self._leave_loop(_Phase.AHEAD if self._first_unused else _Phase.PLAIN)
        wrapper: Any = self._wrapper() if self.updates > self._updates_in_loop else None
        if hasattr(getattr(wrapper, "step", None), "_wrapped_by_lr_sched") and not wrapper._optimizer_step_post_hooks:
            self._warn_once(
                "An update was made after the loop's body, because the last batch was skipped or other ranks had more "
                "batches. `if optimizer.updated: scheduler.step()` in the body misses it. Use a hook: "
                "optimizer.register_step_post_hook(lambda *_: scheduler.step())."
            )
        return in_epoch

    def abort(self) -> None:
        """An error ends this loop."""

    def break_off(self) -> None:
        if self.window.micro_batches or self.passes.arrivals or self.one.weight is not None:
            self.discard()
        self._leave_loop(_Phase.PLAIN)

    def _leave_loop(self, phase: _Phase) -> None:
        self._set_source(None, phase)
        self.current.expect_nothing()
        self.next_epoch()
        self.expect_next()

    def next_epoch(self) -> None:
        self.epoch += self.in_epoch
        self.in_epoch = False

    # The update.

    def update(self) -> bool:
        current, monitor = self.current, self.parameter_monitor
        if current.monitor.looking and self.window.micro_batches:
            monitor.check_parameters()
            monitor.check_settings()
            if self.window.micro_batches > 1 and monitor.values_differ():
                self._warn_once(WRITTEN)
        try:
            if not current.finish():
                return False
            if self.before_update is not None:
                self.before_update()
            self._wrapper()._step_inner()
        finally:
            current.close()
        self.updates += 1
        return True

    # Files.

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "updates": self.updates, "in_epoch": self.in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.updates, self.in_epoch = state["epoch"], state["updates"], state["in_epoch"]
        self.updated = False
        restored = self.window.is_open
        self._interrupted = self._interrupted if self.source is None else self.source
        self._set_source(None, _Phase.RESTORED if restored else _Phase.PLAIN)
        self._scheduled_for = (self.epoch, self.updates) if restored else None
        if restored:
            self.parameter_monitor.note_parameters(looking=True)
        self.expect_next()

    def collect(self) -> None:
        """The optimizer is gone: if in the middle of a window, an error has ended its loop, or it lacks a `flush()`."""
        window = self.window
        if window.is_open and not self.current.saved:
            logger.warning(
                "An optimizer was deleted while its open window held %d of %d micro-batches, whose update was not "
                "made. Call flush() at an epoch's end",
                window.micro_batches,
                window.steps,
            )
        self.current.remove()
