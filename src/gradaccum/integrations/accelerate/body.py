"""What the loop's body asks for around an update: clipping and schedules, on every rank that makes the update.

Ranks may have different numbers of micro-batches. A rank whose loop is over goes on making the others' updates, and no
body asks for anything there. So before each update the ranks compare what was asked for, in one message of a number:
who has asked for nothing clips as the others do, and whose schedule is behind takes over theirs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.optim import Optimizer

__all__ = ["CLIPPING", "LoopBody", "lead_schedules"]

CLIPPING: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "clip_grad_value_": torch.nn.utils.clip_grad_value_,
}


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What one rank knows of an update, in plain numbers."""

    clips: list[tuple[str, list[int], list[Any], dict[str, Any]]]
    """Function, places of the parameters, arguments."""
    steps: list[int]
    """How far each schedule has come."""
    repeated: bool
    """Whether a schedule was stepped here since the last update for a loop that was over."""
    settings: list[dict[str, Any]]
    """Hyperparameters of each group."""


class LoopBody:
    """What the body of one prepared optimizer's loop has asked for, and its turn at each update.

    Args:
        accelerator: Has the schedules.
        optimizer: The wrapped optimizer.
        prepared: The one that the loop sees; schedules may hold either.
    """

    def __init__(self, accelerator: Accelerator, optimizer: Optimizer, prepared: Any) -> None:
        self._accelerator, self._optimizer, self._prepared = accelerator, optimizer, prepared
        self._windows = optimizer._windows
        self._clips: dict[tuple[Any, ...], tuple[str, list[Tensor], tuple[Any, ...], dict[str, Any]]] = {}
        self._clips_of: list[float] | None = None
        """The weights of the window that the clips are of: another window has another list."""
        self._stepped: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        """Schedules that the loop's body has stepped since its last update, and how."""
        self._repeated = False
        self.updating = False
        """Whether an update has begun in the running `step()` or `flush()`, or after the loop."""
        self.norm: Tensor | None = None
        """What the Accelerator's clipping has found at the last update."""
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
        windows = self._windows
        self.updating, self.norm = True, None
        if not windows.after_loop:
            self._stepped.clear()
        clips = [*self._clips.values()] if self._clips_of is windows.accumulation.window.weights else []
        self._clips = {}
        if windows.ranks.several:
            clips = self._agree(clips)
        for name, parameters, args, keywords in clips:
            norm = CLIPPING[name](parameters, *args, **keywords)
            self.norm = self.norm if norm is None else norm

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

    def _agree(self, mine: list[Any]) -> list[Any]:
        """What all ranks clip by, and the hyperparameters of all of them in place."""
        groups, schedules = self._optimizer.param_groups, self._schedules()
        parameters = [*self._windows.parameters(), *self._prepared._sharded.values()]
        places = {id(p): place for place, p in enumerate(parameters)}
        asked = _Asked(
            [
                (
                    name,
                    [places[id(p)] for p in those],
                    [*map(_plain, args)],
                    {k: _plain(v) for k, v in keywords.items()},
                )
                for name, those, args, keywords in mine
            ],
            [getattr(s.scheduler, "last_epoch", 0) for s in schedules],
            self._repeated,
            [{k: _plain(v) for k, v in group.items() if _is_number(v)} for group in groups],
        )
        self._repeated = False
        ranks = self._windows.ranks
        everybody: list[_Asked] = ranks.gather_different(asked)
        if len(everybody) == 1:
            return mine
        furthest = max(one.steps for one in everybody)
        leader = next((i for i, one in enumerate(everybody) if one.steps == furthest and not one.repeated), None)
        settings = [one.settings for one in everybody if one.steps == furthest]
        if any(len(one.steps) != len(furthest) for one in everybody) or leader is None or _differ(settings):
            raise WindowError(
                f"Ranks have different hyperparameters: {_by_rank([one.settings for one in everybody])}. Nothing was "
                "updated. A schedule that is stepped in the loop's body misses updates that come after the loop, on "
                "ranks that have fewer batches. A hook does not: optimizer.register_step_post_hook(lambda *_: "
                "scheduler.step())."
            )
        if any(one.steps != furthest for one in everybody):
            states = ranks.broadcast([s.state_dict() for s in schedules], leader)
            if asked.steps != furthest:
                for schedule, state in zip(schedules, states, strict=True):
                    schedule.load_state_dict(state)
                for group, values in zip(groups, everybody[leader].settings, strict=True):
                    for key, value in values.items():
                        _put(group, key, value)
        clips = [one.clips for one in everybody if one.clips]
        if _differ(clips):
            raise WindowError(
                f"Ranks clip the gradient in different ways: {_by_rank([one.clips for one in everybody])} (function, "
                "parameters by their place in the optimizer, arguments). Nothing was updated. Call the Accelerator's "
                "clipping with the same arguments on every rank."
            )
        if mine or not clips:
            return mine
        return [(name, [parameters[place] for place in at], args, keywords) for name, at, args, keywords in clips[0]]


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


def _is_number(value: Any) -> bool:
    """Whether ranks can compare it without waiting for a device."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, bool | int | float) or (isinstance(value, tuple | list) and all(map(_is_number, value)))


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


def _differ(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"{value or 'none'} on rank {rank}" for rank, value in enumerate(values))
