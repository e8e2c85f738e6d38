"""What passes are run with, so that they bring the same bits each time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """PyTorch's deterministic algorithms, where passes might differ without them: not on one thread of a CPU."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        yield
        return
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills: Any = torch.utils.deterministic
    fill, benchmark = fills.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False  # which would measure what to choose
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        fills.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fill, benchmark


@contextlib.contextmanager
def held_back(replicas: Sequence[nn.Module]) -> Iterator[None]:
    """DistributedDataParallel reduces no gradient, and hands out no buffer."""
    names = "require_backward_grad_sync", "require_forward_param_sync"
    before = [(module, name, getattr(module, name)) for module in replicas for name in names]
    for module, name, _ in before:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
