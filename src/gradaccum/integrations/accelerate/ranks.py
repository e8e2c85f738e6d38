"""Several processes of an Accelerator: clipping and schedules after a loop's end; each one's part of an open window.

Ranks may have different numbers of micro-batches. A rank whose loop is over goes on making the others' updates, clips
as its loop's body did, and steps the schedules that this has stepped. Ranks compare the outcome at each window's end.
"""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradaccum.errors import WindowError
from gradaccum.torch.distributed import Channel, Settings, by_rank
from gradaccum.torch.optimizer import KEY

logger = logging.getLogger("gradaccum")

CLIPPING: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "clip_grad_value_": torch.nn.utils.clip_grad_value_,
}

Clip = tuple[str, list[Tensor], tuple[Any, ...], dict[str, Any]]
"""Function, parameters, arguments."""


class ClipSettings(Settings):
    """What must be the same on all ranks at a window's end: hyperparameters and clipping."""

    known_early = False  # a loop's body clips after its backward pass

    def __init__(self, prepared: Any) -> None:
        super().__init__(lambda: prepared.param_groups)
        self._prepared = prepared

    def number(self) -> float:
        """Goes with a window's message, and differs where these do."""
        places = {id(p): place for place, p in enumerate(self._prepared._all_parameters())}
        self._clips = [
            (name, [places[id(p)] for p in those], _plain(args), {k: _plain(v) for k, v in keywords.items()})
            for name, those, args, keywords in self._prepared._clips_now()
        ]
        return super().number() + zlib.crc32(repr(self._clips).encode())

    def settle(self, channel: Channel) -> None:
        """The ranks' numbers differ: a WindowError that says in what."""
        super().settle(channel)
        clips = channel.gather(self._clips)
        if any(one != clips[0] for one in clips):
            raise WindowError(
                f"Ranks clip the gradient in different ways: {by_rank([one or 'none' for one in clips])} "
                "(function, parameters by their place in the optimizer, arguments). Nothing was updated. Call the "
                "Accelerator's clipping with the same arguments on every rank; where one has no batch at all, "
                "prepare_optimizer(..., clip_grad_norm=...) clips there, too."
            )


def _plain(value: Any) -> Any:
    """A number in place of a tensor."""
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class Schedules:
    """Steps the prepared schedules of an optimizer after updates that come after the loop, as its body has done."""

    def __init__(self, accelerator: Accelerator, prepared: Any) -> None:
        self._accelerator, self._prepared = accelerator, prepared
        self._positions: list[int] | None = None
        """Where they stood, when the loop's body went on after its last update."""
        self._stepped: list[Any] = []
        """Those that the body steps after an update."""
        self._warned = False

    def body_goes_on(self) -> None:
        """An update was made in the loop, whose body may step schedules next."""
        self._positions = [_position(schedule) for schedule in self._prepared_ones()]

    def look(self) -> None:
        """The body is over for its last update, or the next update begins: find the schedules that it has stepped."""
        if self._positions is not None:
            pairs = zip(self._prepared_ones(), self._positions, strict=False)
            moved = [s for s, before in pairs if _position(s) != before]
            self._stepped = [s for s in moved if not isinstance(s.scheduler, ReduceLROnPlateau)]
            self._positions = None

    def updated_after_loop(self) -> None:
        """Nobody else steps the loop's schedules."""
        for schedule in self._stepped:
            schedule.step()
        optimizers = self._prepared, self._prepared.optimizer
        by_hook = len(optimizers[1]._optimizer_step_post_hooks) > 1
        plain = any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers)
        if not (self._stepped or by_hook or self._warned) and (plain or self._prepared_ones()):
            self._warned = True
            logger.warning(
                "An update was made after the loop, as its last batch was skipped or other ranks had more: where "
                "`if optimizer.updated: scheduler.step()` does not see it. A hook does: "
                "optimizer.register_step_post_hook(lambda *_: scheduler.step())."
            )

    def _prepared_ones(self) -> list[Any]:
        own = self._prepared, self._prepared.optimizer, self._prepared.optimizer.inner
        known = self._accelerator._schedulers
        return [s for s in known if any(getattr(s.scheduler, "optimizer", None) is o for o in own)]


def _position(schedule: Any) -> int:
    return getattr(schedule.scheduler, "last_epoch", 0)


class WindowFiles:
    """A process's part of an open window, in the folders of `save_state`: Accelerate writes one process's optimizer."""

    def __init__(self, accelerator: Accelerator, prepared: Any) -> None:
        self._accelerator, self._prepared = accelerator, prepared
        self._folder: Path | None = None
        """What `load_state` reads."""
        self._run = gather_object([secrets.token_hex(8)])[0]
        """The same on all processes, and another in every run and after every `load_state`."""
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._begin_load)

    def marked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict that says of which save it is: the same on all processes, and in no other save."""
        window = state_dict[KEY]
        position = [window["epoch"], window["updates"], window["window"]["micro_batches"]]
        return {**state_dict, KEY: {**window, "save": [self._run, self._number(), *position]}}

    def own_part(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict, inside `load_state` with this process's part of its open window."""
        folder, self._folder = self._folder, None
        window = state_dict.get(KEY)
        if folder is None or window is None or not window["window"]["micro_batches"]:
            return state_dict
        (rank, size), own = window.get("rank", (0, 1)), self._accelerator.process_index
        if size != self._accelerator.num_processes:  # refused later
            return state_dict
        file, part, why = self._file(folder), window, ""
        if rank != own:
            part, why = _read(file)
            if not why and (part.get("save"), part.get("rank")) != (window.get("save"), [own, size]):
                why = "of another save"
        problems = [problem for problem in gather_object([why and f"{file} is {why}"]) if problem]
        if problems:
            raise WindowError(
                f"The checkpoint was taken inside a window, and a process's part of it is not there: {problems[0]}. "
                "Call accelerator.save_state() on all processes, not on the main one alone, let it finish on "
                "all of them, and keep the folder where all of them can read it; or save when `optimizer.updated` is "
                "True."
            )
        return {**state_dict, KEY: part}

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        file = self._file(folder)
        if self._accelerator.is_main_process or not self._prepared.micro_batches:
            file.unlink(missing_ok=True)
        else:
            torch.save(self._prepared.state_dict()[KEY], file)

    def _begin_load(self, models: Any, folder: str) -> None:
        self._folder = Path(folder)
        self._run += "+"

    def _number(self) -> int:
        return next(i for i, one in enumerate(self._accelerator._optimizers) if one is self._prepared)

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"optimizer_{self._number()}_window_{self._accelerator.process_index}.bin"


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """A process's part of an open window, and what is wrong with its file."""
    if not file.exists():
        return {}, "missing"
    try:
        part = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # cut off: errors of zip files, of pickles, of tensors
        return {}, f"not whole ({type(error).__name__})"
    return (part, "") if isinstance(part, dict) else ({}, "not what was written")
