"""Tensors in memory-mapped files: as large as a disk, and in memory as far as somebody reads and writes them."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from gradaccum.core.sizes import format_bytes

__all__ = ["Files", "in_file"]

_CHUNK = 1 << 24
_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""By the address of a tensor's memory."""


def in_file(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a file's.

    Example:
        >>> in_file(torch.zeros(2))
        False
    """
    return _map_of(tensor) is not None


def _map_of(tensor: Tensor) -> mmap.mmap | None:
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not hasattr(tensor, "to_local")
    return _maps.get(tensor.untyped_storage().data_ptr()) if plain else None


class Files:
    """Files in a folder, each with one tensor's numbers; nobody sees them, and their room is free when the tensor is.

    Args:
        folder: Where they are.
        option: How the user has asked for them.

    Raises:
        ValueError: It is no folder.
        OSError: Nothing can be written there.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = Files(folder, "blocks_on")
        ...     tensor = files.moved(torch.arange(3))
        ...     tensor, in_file(tensor), os.listdir(folder)
        (tensor([0, 1, 2]), True, [])
    """

    def __init__(self, folder: str | os.PathLike[str], option: str) -> None:
        self._folder, self._option = Path(folder), option
        self._reserve: IO[bytes] | None = None
        self._reserved = 0
        if not self._folder.is_dir():
            raise ValueError(f"`{option}` must be 'cpu' or a folder that exists. Received: {option}={str(folder)!r}.")
        self._file(1, "What blocks have").close()

    def moved(self, tensor: Tensor, what: str = "A tensor") -> Tensor:
        """The same numbers in a file.

        Args:
            tensor: On the CPU, and dense.
            what: What an error calls it.

        Raises:
            OSError: There is no room.
        """
        if not tensor.numel():
            return tensor
        self.reserve(max(self._reserved - tensor.nbytes, 0))
        with self._file(tensor.nbytes, what) as file:
            memory = mmap.mmap(file.fileno(), tensor.nbytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        _maps[flat.untyped_storage().data_ptr()] = memory
        like = torch.empty_like(tensor, device="meta")  # of a view only what it shows
        return torch.as_strided(flat, like.shape, like.stride()).copy_(tensor.detach())

    def reserve(self, nbytes: int) -> None:
        """Have room for so many bytes that come later, in place of what was reserved before.

        Raises:
            OSError: There is none.
        """
        if nbytes == self._reserved:
            return
        if nbytes > self._reserved or self._reserve is None:
            if self._reserve is not None:
                self._reserve.close()
            self._reserve, self._reserved = None, 0
            self._reserve = self._file(nbytes, "The optimizer's state")
            weakref.finalize(self, self._reserve.close)
        else:
            self._reserve.truncate(nbytes)
        self._reserved = nbytes

    @staticmethod
    def read_ahead(tensors: list[Tensor]) -> None:
        """These will be wanted soon: the system reads them beside what is computed, where it can."""
        for tensor in tensors:
            memory = _map_of(tensor)
            if memory is not None and hasattr(mmap, "MADV_WILLNEED"):
                memory.madvise(mmap.MADV_WILLNEED)

    def _file(self, nbytes: int, what: str) -> IO[bytes]:
        """A file without a name that has room for so many bytes: a mapped one without it would end the process."""
        file: IO[bytes] | None = None
        try:
            file = tempfile.TemporaryFile(prefix="gradaccum-", dir=self._folder)  # noqa: SIM115  # closed by who asks
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
            else:
                for start in range(0, max(nbytes, 1), _CHUNK):
                    file.write(bytes(min(_CHUNK, max(nbytes, 1) - start)))
                file.flush()
        except OSError as error:
            if file is not None:
                file.close()
            there = self._folder.is_dir()
            free = f"{format_bytes(shutil.disk_usage(self._folder).free)} are free" if there else "it is gone"
            raise OSError(
                f"{what} could not be put into the folder of {self._option}={str(self._folder)!r}: "
                f"{format_bytes(nbytes)} are needed, and {free} ({error}). Give it a folder with more room, or "
                f"{self._option}='cpu'."
            ) from error
        return file
