"""Windows that grow with the measured noise scale: more rows per update, as soon as an update can use them.

A window is doubled when the noise scale of the last updates is well above its rows, and halved when it is well below
them. Both decisions need the whole confidence interval (80 %) to lie on that side, and their thresholds are a factor of
two apart, so a window that has just been doubled is not halved on the same measurements.

The learning rate is the one of the smallest window; at every update it is multiplied by what the larger window stands
for, and put back: schedulers, logs and checkpoints see theirs.

Sources: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018 (the noise scale, and batches that follow
it). Goyal et al., "Accurate, Large Minibatch SGD", 2017 (the linear rule). Malladi et al., "On the SDEs and Scaling
Rules for Adaptive Gradient Algorithms", 2022 (the square root, with the betas).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, get_args

from gradaccum.core.noise.scale import NoiseScale
from gradaccum.schedule import Schedule, Steps, checked_count

__all__ = ["AnySteps", "NoiseSchedule", "schedule_of"]

logger = logging.getLogger("gradaccum")

Rule = Literal["sqrt", "linear"]

CONFIDENCE = 0.8
"""Of the interval that decides: a window that is doubled too early costs some rows, one that never is, updates."""

_BAND = math.sqrt(2)
"""Ratio of the noise scale to the rows of a window, and back, from which on the window is doubled or halved."""


class Measuring(Protocol):
    """What measures the noise scale: a TrainStep, or a wrapped optimizer."""

    @property
    def noise_scale(self) -> NoiseScale:
        """Over the last updates."""


class NoiseSchedule:
    """`steps` that follow the measured noise scale, between two bounds.

    Pass it as `steps` to a PyTorch optimizer of this library, which then measures the noise scale by itself. With
    `TrainStep(noise_scale=True)`, whose caller makes the batches, take `steps` times the rows of a micro-batch for each
    batch, and hand the step to `observe` after it.

    Args:
        smallest: Steps of the first windows, >= 2: the first micro-batch is compared with its window.
        largest: Most steps of a window.
        every: Updates from one decision to the next, which are what it looks at: dozens at least.
        scale_learning_rate: How the learning rate follows a window `r` times as long as the smallest: `"sqrt"` times
            the root of r, with Adam's betas to the power of r, which keeps their memory the same in rows; `"linear"`
            times r, as for SGD; None not at all.

    Raises:
        TypeError: A number is no int.
        ValueError: One is out of range, or the rule is unknown.

    Example:
        >>> schedule = NoiseSchedule(2, 32, every=50, scale_learning_rate="sqrt")
        >>> schedule.steps, schedule.factor
        (2, 1.0)
    """

    def __init__(
        self, smallest: int, largest: int, *, every: int = 100, scale_learning_rate: Rule | None = None
    ) -> None:
        self.smallest = checked_count(smallest, "smallest", least=2)
        self.largest = checked_count(largest, "largest", least=self.smallest)
        self.every = checked_count(every, "every", least=2)
        if scale_learning_rate is not None and scale_learning_rate not in get_args(Rule):
            raise ValueError(
                f'`scale_learning_rate` must be "sqrt", "linear" or None. Received: {scale_learning_rate!r}.'
            )
        self.scale_learning_rate = scale_learning_rate
        self.steps = self.smallest
        """Of the next window."""
        self.updates = 0
        """Observed since the last decision."""
        self._told = False
        self._seen: Any = None

    @staticmethod
    def of(schedule: Schedule) -> NoiseSchedule | None:
        """The one that an optimizer's schedule follows, if any."""
        return schedule.function.followed if isinstance(schedule.function, _Followed) else None

    @property
    def factor(self) -> float:
        """How many times as long as the smallest a window is."""
        return self.steps / self.smallest

    @property
    def learning_rate_factor(self) -> float:
        """What the learning rate is to be multiplied by."""
        return {None: 1.0, "linear": self.factor, "sqrt": math.sqrt(self.factor)}[self.scale_learning_rate]

    def observe(self, measuring: Measuring) -> bool:
        """An update was made. Every `every` updates this reads the noise scale, which waits for the device.

        An update that it has been told of already counts once.

        Args:
            measuring: The `TrainStep` that made it, with `noise_scale=True`.

        Returns:
            Whether `steps` has changed.

        Raises:
            TypeError: It measures no noise scale.
        """
        if not hasattr(type(measuring), "noise_scale"):
            raise TypeError(
                "`measuring` must be a TrainStep with noise_scale=True. "
                f"Received: {measuring!r} of type {type(measuring).__name__}."
            )
        update = id(measuring), getattr(measuring, "updates", None)
        if update == self._seen and update[1] is not None:
            return False
        self._seen = update
        return self.due() and self.move(measuring.noise_scale)

    def due(self) -> bool:
        """Count an update. Returns whether a decision follows."""
        self.updates += 1
        if self.updates < self.every:
            return False
        self.updates = 0
        return True

    def vote(self, scale: NoiseScale) -> int:
        """1 for longer windows, -1 for shorter ones, else 0.

        Args:
            scale: Measured over `every` updates at least, of which the last ones decide.

        Example:
            >>> from gradaccum.core.noise import Norms, estimate
            >>> measured = estimate([Norms(600 + wobble, 8, 301 - wobble, 16) for wobble in (-1, 1) * 50])
            >>> NoiseSchedule(2, 32).vote(measured)  # 2,393 rows, well above 16
            1
        """
        recent = scale.last(self.every, CONFIDENCE)
        if math.isnan(recent.value):
            if not self._told:
                self._told = True
                logger.warning(
                    "The noise scale could not be measured in the last %d updates, so windows stay %d micro-batches "
                    "long. It takes two micro-batches in each, with finite gradients.",
                    self.every,
                    self.steps,
                )
            return 0
        low, high = recent.interval
        if low > recent.batch_size * _BAND and self.steps < self.largest:
            return 1
        return -1 if high * _BAND < recent.batch_size and self.steps > self.smallest else 0

    def move(self, scale: NoiseScale, direction: int | None = None) -> bool:
        """Double the window's steps, or halve them, or leave them. Returns whether they have changed.

        Args:
            scale: What was measured.
            direction: What several ranks have agreed upon; None: what `vote` says.
        """
        before, direction = self.steps, self.vote(scale) if direction is None else direction
        if direction > 0:
            self.steps = min(2 * before, self.largest)
        elif direction < 0:
            lengths = [self.smallest]
            while lengths[-1] * 2 < before:
                lengths.append(lengths[-1] * 2)
            self.steps = lengths[-1]
        if self.steps != before:
            recent = scale.last(self.every, CONFIDENCE)
            logger.info("Windows of %d micro-batches instead of %d from here on: %s", self.steps, before, recent)
        return self.steps != before

    @contextlib.contextmanager
    def scaled(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Have learning rates and betas follow the window, for one update.

        Args:
            groups: The optimizer's, with its hyperparameters.

        Raises:
            ValueError: One has no learning rate.
        """
        if self.scale_learning_rate is None or self.factor == 1.0:
            yield
            return
        put: list[tuple[dict[str, Any], str, Any, Any]] = []
        for group in groups:
            if group.get("lr") is None:
                raise ValueError(
                    f"A group of the optimizer has no learning rate that scale_learning_rate="
                    f"{self.scale_learning_rate!r} could scale. It has {sorted(group)}. Use scale_learning_rate=None."
                )
            new = {"lr": group["lr"] * self.learning_rate_factor}
            if self.scale_learning_rate == "sqrt" and group.get("betas") is not None:
                new["betas"] = tuple(None if beta is None else beta**self.factor for beta in group["betas"])
            for name, value in new.items():
                put.append((group, name, group[name], value))
                group[name] = value
        try:
            yield
        finally:
            for group, name, before, value in put:
                if group[name] is value:  # else the optimizer has set it
                    group[name] = before

    def state_dict(self) -> dict[str, Any]:
        """How long windows are, and how many updates ago that was decided."""
        return {"steps": self.steps, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` wrote, within these bounds.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(state, Mapping) or not {"steps", "updates"} <= state.keys():
            raise ValueError(f"`state` must be what a NoiseSchedule's state_dict() wrote. Received: {state!r}.")
        self.steps = min(max(checked_count(state["steps"], "steps"), self.smallest), self.largest)
        self.updates = checked_count(state["updates"], "updates", least=0)

    def __repr__(self) -> str:
        rule = f", scale_learning_rate={self.scale_learning_rate!r}" if self.scale_learning_rate else ""
        return f"NoiseSchedule({self.smallest}, {self.largest}, every={self.every}{rule})"


AnySteps = Steps | NoiseSchedule
"""What may be passed as `steps` where the noise scale is measured."""


def schedule_of(steps: AnySteps) -> Schedule:
    """The schedule of a number, a table, a function, or one that follows the noise scale.

    Example:
        >>> schedule_of(NoiseSchedule(2, 8))()
        2
    """
    return Schedule(_Followed(steps) if isinstance(steps, NoiseSchedule) else steps)


class _Followed:
    """The steps of the next window, as a function of epoch and update that knows better than these."""

    def __init__(self, followed: NoiseSchedule) -> None:
        self.followed = followed

    def __call__(self, epoch: int, update: int) -> int:
        return self.followed.steps

    def __repr__(self) -> str:
        return repr(self.followed)
