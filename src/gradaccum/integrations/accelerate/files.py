"""`save_state` and `load_state` in the middle of a window: Accelerate writes the optimizer of one process alone.

The other processes have another part of the open window. Each adds a file with it, and all of them load or none does.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gradaccum.errors import WindowError
from gradaccum.torch.optimizer import KEY

__all__ = ["WindowFiles", "loading_together"]


class WindowFiles:
    """One process's part of an open window, in the folders of `save_state`."""

    def __init__(self, accelerator: Accelerator, prepared: Any) -> None:
        self._accelerator, self._prepared = accelerator, prepared
        self._folder: Path | None = None
        """What `load_state` reads."""
        self.is_loading = False
        """Whether the processes have yet to hear from each other how loading went."""
        self._run = ""
        """The same on all processes, and another in every run and after every `load_state`."""
        self.agree()
        accelerator.register_save_state_pre_hook(self._save_own_part)
        accelerator.register_load_state_pre_hook(self._remember_folder)

    def agree(self, failed: Exception | None = None) -> list[tuple[int, str]]:
        """Draw a new name of the run with all processes; returns those on which something has failed, and what."""
        mine = self._accelerator.process_index, failed and f"{type(failed).__name__}: {failed}", secrets.token_hex(8)
        everybody = gather_object([mine])
        self._run, self.is_loading = everybody[0][2], False
        return [(rank, message) for rank, message, _ in everybody if message]

    def settle(self, failed: Exception | None) -> None:
        """Raise what has failed here, or elsewhere: others would go on, and wait for that process."""
        others = self.agree(failed)
        if failed is not None:
            raise failed
        if others:
            rank, message = others[0]
            raise WindowError(f"The checkpoint could not be loaded on rank {rank}, so it is on none. There: {message}")

    def load(self, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
        """Load a state dict, inside `load_state` with this process's part of its open window."""
        folder, self._folder, failed = self._folder, None, None
        if folder is None:
            return load(state_dict)
        try:
            load(self._with_own_part(folder, state_dict))
        except Exception as error:
            failed = error
        self.settle(failed)

    def save_point(self, window: dict[str, Any]) -> list[Any]:
        """What is the same on all processes in one `save_state`, and in no other one."""
        return [self._run, self._number(), window["epoch"], window["updates"], window["window"]["micro_batches"]]

    def _save_own_part(self, models: Any, weights: Any, folder: str) -> None:
        file = self._own_file(folder)
        if self._accelerator.is_main_process or not self._prepared.micro_batches:
            file.unlink(missing_ok=True)
        else:
            torch.save(self._prepared.state_dict()[KEY], file)

    def _remember_folder(self, models: Any, folder: str) -> None:
        self._folder = Path(folder)

    def _with_own_part(self, folder: Path, state_dict: dict[str, Any]) -> dict[str, Any]:
        window = state_dict.get(KEY)
        if window is None or not window["window"]["micro_batches"]:
            return state_dict
        (rank, size), accelerator = window.get("rank", (0, 1)), self._accelerator
        if size != accelerator.num_processes or rank == accelerator.process_index:  # the former is refused later
            return state_dict
        file = self._own_file(folder)
        part, why = _read(file)
        if not why and (part.get("save"), part.get("rank")) != (window.get("save"), [accelerator.process_index, size]):
            why = "of another save"
        if why:
            raise WindowError(
                f"The checkpoint was taken inside a window, and this process's part of it is not there: {file} is "
                f"{why}. Call accelerator.save_state() on all processes, not on the main one alone, let it finish on "
                "all of them, and keep the folder where all of them can read it; or save when `optimizer.updated` is "
                "True."
            )
        return {**state_dict, KEY: part}

    def _number(self) -> int:
        return next(i for i, one in enumerate(self._accelerator._optimizers) if one is self._prepared)

    def _own_file(self, folder: str | Path) -> Path:
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


def loading_together(load_state: Callable[..., Any], files: Callable[[], list[WindowFiles]]) -> Callable[..., Any]:
    """`load_state` that succeeds on all processes or on none: those that have come further would wait for one."""

    @functools.wraps(load_state)
    def together(*args: Any, **keywords: Any) -> Any:
        listed, failed = files(), None
        if not listed:
            return load_state(*args, **keywords)
        for one in listed:
            one.is_loading = True
        try:
            load_state(*args, **keywords)
        except Exception as error:
            failed = error
        for one in [one for one in listed if one.is_loading]:
            one.agree(failed)
        return listed[0].settle(failed)

    return together
