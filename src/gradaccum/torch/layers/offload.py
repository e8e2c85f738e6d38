"""Activations offloaded until backward wants them: kept where they are, in host memory, or in files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.core.sizes import format_bytes
from gradaccum.on_torch.memory import is_out_of_memory

__all__ = ["OffloadChoice", "Store", "Waiting"]

OffloadChoice = bool | str | os.PathLike[str]
"""Whether activations wait in host memory; or a folder, in whose files they wait."""

_streams: dict[torch.device, Any] = {}


class Waiting:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    @property
    def edited(self) -> bool:
        """Whether somebody has written to it since."""
        return self._version is not None and self._tensor._version != self._version

    def prefetch(self) -> None:
        """It will be wanted soon."""

    def get(self) -> Tensor:
        """The tensor."""
        return self._tensor


class _OnHost(Waiting):
    """In pinned host memory; copied both ways beside what the device computes."""

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._version = tensor.device, None
        self._stream = _streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._there: Tensor | None = None
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)

    def prefetch(self) -> None:
        if self._there is None:
            with torch.cuda.stream(self._stream):
                self._there = self._host.to(self._device, non_blocking=True)

    def get(self) -> Tensor:
        self.prefetch()
        there, self._there = self._there, None
        assert there is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        there.record_stream(current)
        return there


class _InFile(Waiting):
    """In a file, which is gone as soon as nobody waits for it any more."""

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self._device, self._version = tensor.device, None
        self._folder, self._nbytes = folder, tensor.nbytes
        with self._explained("written to"):
            handle, name = tempfile.mkstemp(".pt", "gradaccum-", folder)
            os.close(handle)
            self._path = Path(name)
            weakref.finalize(self, self._path.unlink, missing_ok=True)
            torch.save(tensor.detach().clone(), self._path)  # of a view only what it shows

    def get(self) -> Tensor:
        with self._explained("read from"):
            loaded: Tensor = torch.load(self._path, map_location=self._device, weights_only=True)
        return loaded

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch.save's own, where a disk is full
            if is_out_of_memory(error):
                raise
            there = self._folder.is_dir()
            free = f"{format_bytes(shutil.disk_usage(self._folder).free)} are free" if there else "it is gone"
            raise OSError(
                f"An activation of {format_bytes(self._nbytes)} could not be {what} the folder of "
                f"offload={str(self._folder)!r} ({free}): {error}. Give it a folder with more room, or offload=True."
            ) from error


class Store:
    """Keeps tensors until backward wants them, each once however many blocks are called with it.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     waiting = Store(folder).keep(torch.ones(2))
        ...     files, tensor = len(os.listdir(folder)), waiting.get()
        ...     del waiting
        ...     files, tensor, os.listdir(folder)
        (1, tensor([1., 1.]), [])
    """

    def __init__(self, offload: OffloadChoice = False) -> None:
        self._folder: Path | None = None
        self._on_host = offload is True
        self._kept: Any = WeakIdKeyDictionary()
        if isinstance(offload, bool):
            return
        if not isinstance(offload, (str, os.PathLike)):
            raise TypeError(f"`offload` must be True, False or a folder. Received: offload={offload!r}.")
        self._folder = Path(offload)
        if not self._folder.is_dir():
            raise ValueError(f"`offload` must be True, False or a folder that exists. Received: offload={offload!r}.")

    def keep(self, tensor: Tensor) -> Waiting:
        """The tensor, to be had again later."""
        found = self._kept.get(tensor)
        waiting: Waiting | None = None if found is None else found()
        if waiting is None or waiting.edited:
            waiting = self._waiting(tensor)
            self._kept[tensor] = weakref.ref(waiting)
        return waiting

    def _waiting(self, tensor: Tensor) -> Waiting:
        plain = tensor.layout is torch.strided and not hasattr(tensor, "to_local") and tensor.dim() > 0
        if plain and self._folder is not None:
            return _InFile(tensor, self._folder)
        return _OnHost(tensor) if plain and self._on_host and tensor.is_cuda else Waiting(tensor)
