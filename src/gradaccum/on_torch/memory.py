"""How much memory there is, and how much is in use: on a device, or in the container this process runs in."""

from __future__ import annotations

import gc
import re
from typing import Any

import torch

from gradaccum.sizes import container_limits, free_host_memory, process_memory

__all__ = ["Gauge", "container_limits", "free_host_memory", "is_out_of_memory", "parse_bytes", "process_memory"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4} | {
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}
_MESSAGES = (
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def parse_bytes(size: Any) -> int | None:
    """`memory_limit` in bytes; None stays None.

    Raises:
        TypeError, ValueError: Neither a positive number of bytes nor a string such as "4GiB" or "500 MB".

    Example:
        >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes(1024)
        (4294967296, 1500000, 1024)
    """
    if size is None:
        return None
    must = '`memory_limit` must be a positive number of bytes or a string such as "4GiB".'
    received = f"Received: memory_limit={size!r}."
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", size.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{must} {received}")
        size = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"{must} {received}")
    if size < 1:
        raise ValueError(f"{must} {received}")
    return int(size)


class Gauge:
    """What is in use on a device and what may be: torch's allocator on CUDA, this process' memory on the CPU.

    Args:
        device: Where the model is.
        limit: Bytes that may be in use; None: what the device, or the container, has free on top of what is in use.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self._limit = limit

    def live(self) -> int:
        """Bytes in use now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return process_memory()["VmRSS"]

    def mark(self) -> int:
        """The most bytes ever in use. It only rises, so it tells a peak only where it has risen."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return process_memory()["VmHWM"]

    def limit(self) -> float | None:
        """Bytes that may be in use; None where nothing says."""
        if self._limit is not None:
            return self._limit
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        free = free_host_memory()
        return self.live() + free if free is not None else None

    def synchronize(self) -> None:
        """Wait for the device, so that a clock tells what ran."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give cached memory back, after it ran out."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
