"""Several processes of an Accelerator: the same clipping on all of them, and each one's part of an open window."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.distributed import Channel, Settings, by_rank
from gradaccum.torch.optimizer import KEY

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
            try:
                part = torch.load(file, map_location="cpu", weights_only=True)
                if (part.get("save"), part.get("rank")) != (window.get("save"), [own, size]):
                    why = "of another save"
            except FileNotFoundError:
                why = "missing"
            except Exception as error:  # cut off: errors of zip files, of pickles, of tensors
                why = f"not whole ({type(error).__name__})"
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
