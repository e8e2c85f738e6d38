"""How much memory there is, and how much is in use: on a device, or in the container this process runs in."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from gradaccum.core.sizes import free_host_memory, process_memory

_MESSAGES = (
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: of a DTensor its part, in the same memory; of others all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class MemoryMeter:
    """What is in use on a device and what may be: torch's allocator on CUDA, this process' memory on the CPU."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self._limit = limit

    def live(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return process_memory()["VmRSS"]

    def mark(self) -> int:
        """The most bytes ever in use. It only rises, so it tells a peak only where it has risen."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return process_memory()["VmHWM"]

    def limit(self) -> float | None:
        if self._limit is not None:
            return self._limit
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        free = free_host_memory()
        return self.live() + free if free is not None else None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
