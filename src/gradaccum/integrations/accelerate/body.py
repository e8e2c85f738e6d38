"""What the loop's body asks for around an update: clipping and schedules, on every rank that makes the update.

Ranks may have different numbers of micro-batches. A rank whose loop is over goes on making the others' updates, and no
body asks for anything there. So what was asked for is a part of what the ranks compare at a window's end: who has asked
for nothing clips as the others do, and whose schedule is behind takes over theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.distributed import Meeting, Settings, by_rank
from gradaccum.torch.optim import Optimizer

__all__ = ["CLIPPING", "LoopBody", "lead_schedules"]

CLIPPING: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "clip_grad_value_": torch.nn.utils.clip_grad_value_,
}


_Clip = tuple[str, list[Tensor], tuple[Any, ...], dict[str, Any]]
"""Function, parameters, arguments."""


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What one rank knows of an update, in plain numbers."""

    clips: list[tuple[str, list[int], list[Any], dict[str, Any]]]
    """Function, places of the parameters, arguments."""
    steps: list[int]
    """How far each schedule has come."""
    repeated: bool
    """Whether a schedule was stepped here since the last window for a loop that was over."""
    settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Hyperparameters of each group."""


class LoopBody(Settings):
    """What the body of one prepared optimizer's loop has asked for, and its turn at each update.

    Args:
        accelerator: Has the schedules.
        optimizer: The wrapped optimizer.
        prepared: The one that the loop sees; schedules may hold either.
    """

    def __init__(self, accelerator: Accelerator, optimizer: Optimizer, prepared: Any) -> None:
        super().__init__(lambda: optimizer.param_groups)
        self._accelerator, self._optimizer, self._prepared = accelerator, optimizer, prepared
        self._windows = optimizer._windows
        self._clips: dict[tuple[Any, ...], _Clip] = {}
        self._clips_of: list[float] | None = None
        """The weights of the window that the clips are of: another window has another list."""
        self._stepped: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        """Schedules that the loop's body has stepped since its last update, and how."""
        self._repeated = False
        self.updating = False
        """Whether an update has begun in the running `step()` or `flush()`, or after the loop."""
        self.norm: Tensor | None = None
        """What the Accelerator's clipping has found at the last update."""
        if self._windows.ranks.is_distributed:
            self._windows.ranks.settings = self
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def clip(self, name: str, parameters: list[Tensor], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Clip the finished gradient of these parameters, when this window closes."""
        weights = self._windows.accumulation.window.weights
        if self._clips_of is not weights:  # those before made no update: an overflow, or discard()
            self._clips, self._clips_of = {}, weights
        self._clips[name, tuple(map(id, parameters))] = name, parameters, args, keywords

    def step_schedule(self, schedule: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Remember that the loop's body steps this one: it is stepped after updates that come after the loop, too."""
        windows = self._windows
        if windows.source is not None and not (windows.after_loop or self.updating) and schedule in self._schedules():
            self._stepped[id(schedule)] = schedule, args, keywords

    def _schedules(self) -> list[Any]:
        """The prepared schedules of this optimizer."""
        own = self._prepared, self._optimizer, self._optimizer.inner
        return [
            s for s in self._accelerator._schedulers if any(getattr(s.scheduler, "optimizer", None) is o for o in own)
        ]

    # At an update.

    def _before(self, *_: Any) -> None:
        self.updating, self.norm = True, None
        if not self._windows.after_loop:
            self._stepped.clear()
        clips, self._clips = self._asked_clips(), {}
        for name, parameters, args, keywords in clips:
            norm = CLIPPING[name](parameters, *args, **keywords)
            self.norm = self.norm if norm is None else norm

    def _asked_clips(self) -> list[_Clip]:
        """Those of the window that closes."""
        return [*self._clips.values()] if self._clips_of is self._windows.accumulation.window.weights else []

    def _after(self, *_: Any) -> None:
        if not self._windows.after_loop:
            return
        for schedule, args, keywords in self._stepped.values():
            type(schedule).step(schedule, *args, **keywords)
            self._repeated = True
        hooks = len(self._optimizer._optimizer_step_post_hooks) > 1
        stepped = [hasattr(o.step, "_wrapped_by_lr_sched") for o in (self._prepared, self._optimizer)]
        if not (self._stepped or hooks) and (any(stepped) or self._schedules()):
            self._windows.tell_of_schedule()

    def number(self) -> float:
        settings, repeated, self._repeated = super().number(), self._repeated, False
        places = {id(p): place for place, p in enumerate(self._parameters())}
        clips = [
            (name, [places[id(p)] for p in those], [*map(_plain, args)], {k: _plain(v) for k, v in keywords.items()})
            for name, those, args, keywords in self._asked_clips()
        ]
        steps = [getattr(s.scheduler, "last_epoch", 0) for s in self._schedules()]
        self._asked = _Asked(clips, steps, repeated)
        return settings + zlib.crc32(repr((clips, steps, repeated)).encode())

    def settle(self, ranks: Meeting) -> None:
        """Take over what the others have asked for, where this rank's loop is over.

        Raises:
            WindowError: Loops that go on have asked for different things, or who is right can't be told.
        """
        everybody: list[_Asked] = ranks.gather(dataclasses.replace(self._asked, settings=self.hyperparameters()))
        furthest = max(one.steps for one in everybody)
        leader = next((i for i, one in enumerate(everybody) if one.steps == furthest and not one.repeated), None)
        ahead = [one.settings for one in everybody if one.steps == furthest]
        if leader is None or any(theirs != ahead[0] for theirs in ahead):
            self.check([one.settings for one in everybody])
        if leader is None or any(len(one.steps) != len(furthest) for one in everybody):
            raise WindowError(
                f"Ranks have different schedules: {by_rank([one.steps for one in everybody])} (how far each has come). "
                "Nothing was updated. Prepare and step the same ones on every rank."
            )
        if any(one.steps != furthest for one in everybody):
            self._take_over(everybody, leader, ranks)
        clips = [one.clips for one in everybody if one.clips]
        if any(theirs != clips[0] for theirs in clips):
            raise WindowError(
                f"Ranks clip the gradient in different ways: {by_rank([one.clips or 'none' for one in everybody])} "
                "(function, parameters by their place in the optimizer, arguments). Nothing was updated. Call the "
                "Accelerator's clipping with the same arguments on every rank."
            )
        if clips and not self._asked.clips:
            parameters = self._parameters()
            for name, places, args, keywords in clips[0]:
                self.clip(name, [parameters[place] for place in places], tuple(args), keywords)

    def _take_over(self, everybody: list[_Asked], leader: int, ranks: Meeting) -> None:
        """Have schedules and hyperparameters as that rank has them."""
        schedules, theirs = self._schedules(), everybody[leader]
        states = ranks.broadcast([s.state_dict() for s in schedules], leader)
        if self._asked.steps != theirs.steps:
            for schedule, state in zip(schedules, states, strict=True):
                schedule.load_state_dict(state)
            for group, values in zip(self._optimizer.param_groups, theirs.settings, strict=True):
                for key, value in values.items():
                    _put(group, key, value)

    def _parameters(self) -> list[Tensor]:
        return [*self._windows.parameters(), *self._prepared._sharded.values()]


def lead_schedules(accelerator: Accelerator, bodies: Callable[[], list[LoopBody]]) -> None:
    """Have loops' bodies know of prepared schedules that are stepped, those that are prepared later among them."""
    prepare = accelerator.prepare_scheduler
    if getattr(prepare, "__wrapped__", None) is not None:
        return

    @functools.wraps(prepare)
    def prepare_scheduler(*args: Any, **keywords: Any) -> Any:
        return led(prepare(*args, **keywords))

    def led(schedule: Any) -> Any:
        original = schedule.step

        @functools.wraps(original)
        def step(*args: Any, **keywords: Any) -> None:
            for body in bodies():
                body.step_schedule(schedule, args, keywords)
            original(*args, **keywords)

        if getattr(original, "__wrapped__", None) is None:
            schedule.step = step
        return schedule

    accelerator.prepare_scheduler = prepare_scheduler
    for schedule in accelerator._schedulers:
        led(schedule)


def _plain(value: Any) -> Any:
    """A number in place of a tensor."""
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    old = group[key]
    if isinstance(old, Tensor):
        old.fill_(value)
    else:
        group[key] = type(old)(value) if isinstance(old, tuple) else value
