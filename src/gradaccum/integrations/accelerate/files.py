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
        self.run = _agree(accelerator)[0]
        """The same on all processes, and another in every run and after every `load_state`."""
        accelerator.register_save_state_pre_hook(self._save_own_part)
        accelerator.register_load_state_pre_hook(self._remember_folder)

    def own_part(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict, inside `load_state` with this process's part of its open window."""
        folder, self._folder = self._folder, None
        window = state_dict.get(KEY)
        if folder is None or window is None or not window["window"]["micro_batches"]:
            return state_dict
        (rank, size), own = window.get("rank", (0, 1)), self._accelerator.process_index
        if size != self._accelerator.num_processes or rank == own:  # the former is refused later
            return state_dict
        file = self._own_file(folder)
        part, why = _read(file)
        if not why and (part.get("save"), part.get("rank")) != (window.get("save"), [own, size]):
            why = "of another save"
        if why:
            raise WindowError(
                f"The checkpoint was taken inside a window, and this process's part of it is not there: {file} is "
                f"{why}. Call accelerator.save_state() on all processes, not on the main one alone, let it finish on "
                "all of them, and keep the folder where all of them can read it; or save when `optimizer.updated` is "
                "True."
            )
        return {**state_dict, KEY: part}

    def save_point(self, window: dict[str, Any]) -> list[Any]:
        """What is the same on all processes in one `save_state`, and in no other one."""
        return [self.run, self._number(), window["epoch"], window["updates"], window["window"]["micro_batches"]]

    def _save_own_part(self, models: Any, weights: Any, folder: str) -> None:
        file = self._own_file(folder)
        if self._accelerator.is_main_process or not self._prepared.micro_batches:
            file.unlink(missing_ok=True)
        else:
            torch.save(self._prepared.state_dict()[KEY], file)

    def _remember_folder(self, models: Any, folder: str) -> None:
        self._folder = Path(folder)

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


def _agree(accelerator: Accelerator, failed: Exception | None = None) -> tuple[str, list[tuple[int, str]]]:
    """A new name of the run from all processes; and those on which something has failed, with what."""
    mine = accelerator.process_index, failed and f"{type(failed).__name__}: {failed}", secrets.token_hex(8)
    everybody = gather_object([mine])
    return everybody[0][2], [(rank, message) for rank, message, _ in everybody if message]


def loading_together(accelerator: Accelerator, load_state: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state` that succeeds on all processes or on none: those that go on would wait for one that does not."""

    @functools.wraps(load_state)
    def together(*args: Any, **keywords: Any) -> Any:
        files = [one for o in accelerator._optimizers if (one := getattr(o, "_gradaccum_files", None))]
        failed = None
        if not files:
            return load_state(*args, **keywords)
        try:
            load_state(*args, **keywords)
        except Exception as error:
            failed = error
        run, others = _agree(accelerator, failed)
        for one in files:
            one.run = run
        if failed is not None:
            raise failed
        if others:
            rank, message = others[0]
            raise WindowError(f"The checkpoint could not be loaded on rank {rank}, so it is on none. There: {message}")

    return together
