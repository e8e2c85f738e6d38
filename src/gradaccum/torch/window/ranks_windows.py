"""The windows of one optimizer on several ranks, which begin and close them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradaccum.schedule import Schedule
from gradaccum.torch.distributed import Ranks
from gradaccum.torch.window.gradient_window import GradientWindow
from gradaccum.torch.window.windows import Windows


class RanksWindows(Windows):
    """Says to the ranks what comes next, and takes part in windows that only other ranks still fill."""

    def __init__(
        self,
        inner: Any,
        schedule: Schedule,
        current: GradientWindow,
        wrapper: Callable[[], Any],
        check_steps: Callable[[Schedule], None],
        ranks: Ranks,
    ) -> None:
        self.ranks, self.may_have_none = ranks, not ranks.sharded
        super().__init__(inner, schedule, current, wrapper, check_steps)

    def expect_next(self, counts: bool = True) -> None:
        # DDP looks at it in the forward pass.
        steps = self.steps
        self.ranks.expect(steps == 1 or self.window.closes_next, steps, self.one.last, counts)

    def expect_batch(self, weight: float, given: bool, last: bool) -> None:
        window = self.window
        if last or weight != window.unit or window.micro_batches + 1 >= window.steps:
            self.expected = None  # the ranks are to know
        super().expect_batch(weight, given, last)

    def count_ordinary(self) -> bool:
        remaining = self.window.steps - self.window.micro_batches
        if remaining <= 1 or self.one.last:
            self.count()
            return False
        ordinary = super().count_ordinary()
        if ordinary and remaining == 2:
            self.expect_next()  # the next one closes the window
        return ordinary

    def several_passes(self) -> None:
        self.ranks.reduce_manually()  # in the first of them, others are to come

    # An epoch's end.

    def flush(self) -> bool:
        self.current.check_failed()
        if self.source is None:
            self.ranks.end_epoch()
        return super().flush()

    def close_early(self) -> None:
        idle = not self.window.micro_batches
        super().close_early()
        if self.source is None:
            self._join_remaining()
        elif idle:
            self._join_remaining(once=True)

    def end_loop(self) -> None:
        self.ranks.end_epoch()
        super().end_loop()
        self._join_remaining()

    def _join_remaining(self, once: bool = False) -> None:
        """Take part in the windows that other ranks still make in this epoch, and in their updates."""
        while self.ranks.others_continue():
            self.in_epoch = True
            self.current.empty()
            self.updated = self.update() or self.updated
            self.current.empty()
            if once:
                break

    def next_epoch(self) -> None:
        super().next_epoch()
        self.ranks.begin_epoch()

    def abort(self) -> None:
        self.ranks.abort()

    def break_off(self) -> None:
        self.ranks.abort()
        super().break_off()

    def collect(self) -> None:
        if self.window.is_open or self.source is not None:
            self.ranks.abort()
        super().collect()
