"""Uneven ranks: one whose loop is over clips as the others do, and takes over their learning-rate schedules.

Ranks may have different numbers of micro-batches. A rank whose loop is over goes on making the others' updates, and no
body asks for anything there. So clipping and schedules are part of what the ranks compare at a window's end, by one
rule: ranks that are in their loops must agree, and the others follow the lowest of them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradaccum.errors import WindowError
from gradaccum.torch.distributed import Channel, Settings, by_rank

__all__ = ["CLIPPING", "Clip", "Following"]

logger = logging.getLogger("gradaccum")

CLIPPING: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "clip_grad_value_": torch.nn.utils.clip_grad_value_,
}

Clip = tuple[str, list[Tensor], tuple[Any, ...], dict[str, Any]]
"""Function, parameters, arguments."""


class Following(Settings):
    """What an update does beside the gradient on one rank: clipping, hyperparameters, and schedules after it."""

    known_early = False  # a loop's body clips after its backward pass

    def __init__(self, accelerator: Accelerator, prepared: Any) -> None:
        super().__init__(lambda: prepared.param_groups)
        self._accelerator, self._prepared = accelerator, prepared
        self._positions: list[int] | None = None
        """Of the schedules, when the loop's body went on after its last update."""
        self._stepped: list[Any] = []
        """Schedules that the loop's body steps after an update."""
        self._is_behind = False
        """Whether the last update came after the loop, so that schedules may have missed it."""
        self._warned = False

    # One update, in this order.

    def look(self) -> None:
        """The loop's body is over for its last update, or the next update begins: find the schedules it stepped."""
        if self._positions is not None:
            pairs = zip(self._schedules(), self._positions, strict=False)
            moved = [s for s, before in pairs if _position(s) != before]
            self._stepped = [s for s in moved if not isinstance(s.scheduler, ReduceLROnPlateau)]
            self._positions = None

    def updated(self, in_body: bool) -> None:
        """An update was made; after the loop, nobody else steps its schedules."""
        self._is_behind = not in_body
        if in_body:
            return
        for schedule in self._stepped:
            schedule.step()
        optimizers = self._prepared, self._prepared.optimizer
        by_hook = len(optimizers[1]._optimizer_step_post_hooks) > 1
        plain = any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers)
        if not (self._stepped or by_hook or self._warned) and (plain or self._schedules()):
            self._warned = True
            logger.warning(
                "An update was made after the loop, as its last batch was skipped or other ranks had more: where "
                "`if optimizer.updated: scheduler.step()` does not see it. A hook does: "
                "optimizer.register_step_post_hook(lambda *_: scheduler.step())."
            )

    def body_goes_on(self) -> None:
        """An update was made in the loop, whose body may step schedules next."""
        self._positions = [_position(schedule) for schedule in self._schedules()]

    # Among ranks.

    def number(self) -> float:
        self.look()
        places = {id(p): place for place, p in enumerate(self._prepared._all_parameters())}
        self._mine: dict[str, Any] = {
            "clips": [
                (name, [places[id(p)] for p in those], _plain(args), {k: _plain(v) for k, v in keywords.items()})
                for name, those, args, keywords in self._prepared._clipped()
            ],
            "schedules": [_position(schedule) for schedule in self._schedules()],
        }
        number = super().number() + zlib.crc32(repr(self._mine).encode())
        self._mine |= {"in_body": self._prepared._in_body, "behind": self._is_behind}
        return number

    def settle(self, channel: Channel) -> None:
        """Take over what the others do, where this rank's loop is over."""
        everybody = channel.gather(self._mine | {"settings": self.hyperparameters()})
        self._settle_schedules(everybody, channel)
        self._settle_clips(everybody)

    def _settle_schedules(self, everybody: list[dict[str, Any]], channel: Channel) -> None:
        leader = next((rank for rank, one in enumerate(everybody) if not one["behind"]), 0)
        theirs, positions = everybody[leader], [one["schedules"] for one in everybody]
        differ = [position != positions[leader] for position in positions]
        self.check([(theirs if one["behind"] and d else one)["settings"] for one, d in zip(everybody, differ)])
        if len({*map(len, positions)}) > 1 or any(d and not one["behind"] for one, d in zip(everybody, differ)):
            raise WindowError(
                f"Ranks have different schedules: {by_rank(positions)} (how far each has come). Nothing was updated. "
                "Prepare and step the same ones on every rank."
            )
        if not any(differ):
            return
        schedules = self._schedules()
        states = channel.broadcast([schedule.state_dict() for schedule in schedules], leader)
        if self._mine["schedules"] == positions[leader]:
            return
        for schedule, state in zip(schedules, states, strict=True):
            schedule.load_state_dict(state)
        for group, values in zip(self._prepared.param_groups, theirs["settings"], strict=True):
            for name, value in values.items():
                old = group[name]
                if isinstance(old, Tensor):
                    old.fill_(value)
                else:
                    group[name] = type(old)(value) if isinstance(old, tuple) else value

    def _settle_clips(self, everybody: list[dict[str, Any]]) -> None:
        asked = [one["clips"] for one in everybody if one["in_body"]] or [one["clips"] for one in everybody]
        if any(clips != asked[0] for clips in asked):
            raise WindowError(
                f"Ranks clip the gradient in different ways: {by_rank([one['clips'] or 'none' for one in everybody])} "
                "(function, parameters by their place in the optimizer, arguments). Nothing was updated. Call the "
                "Accelerator's clipping with the same arguments on every rank."
            )
        if asked[0] != self._mine["clips"]:
            parameters = self._prepared._all_parameters()
            for name, places, args, keywords in asked[0]:
                self._prepared._clips[name, None] = name, [parameters[place] for place in places], args, keywords

    def _schedules(self) -> list[Any]:
        """The prepared schedules of this optimizer."""
        prepared = self._prepared
        own = prepared, prepared.optimizer, prepared.optimizer.inner
        known = self._accelerator._schedulers
        return [s for s in known if any(getattr(s.scheduler, "optimizer", None) is o for o in own)]


def _position(schedule: Any) -> int:
    return getattr(schedule.scheduler, "last_epoch", 0)


def _plain(value: Any) -> Any:
    """A number in place of a tensor."""
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
