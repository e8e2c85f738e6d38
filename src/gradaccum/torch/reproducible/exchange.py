"""What the ranks of a reproducible step tell each other: a few numbers before and after a window, and its sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Exchange:
    """Collectives over the ranks of a model; those of one process alone return what they are given."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self.replicas = replicas
        """The modules whose own reduction is held back."""
        self.group: Any = replicas[0].process_group if replicas else None
        if any(module.process_group is not self.group for module in replicas):
            raise ValueError(
                "reproducible=True takes one process group. Received: a model with DistributedDataParallel modules of "
                "different groups."
            )
        self.size = dist.get_world_size(self.group) if replicas else 1
        self.rank = dist.get_rank(self.group) if replicas else 0
        takes_cpu = replicas and "cpu" in dist.get_backend_config(self.group)
        self._device = torch.device("cpu") if takes_cpu or not replicas else device

    def numbers(self, own: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, of which each has as many."""
        if self.size == 1:
            return [list(own)]
        sent = torch.tensor(own, dtype=torch.float64, device=self._device)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self.group)
        rows: list[list[float]] = torch.stack(found).tolist()
        return rows

    def objects(self, own: Any) -> list[Any]:
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def lists(self, own: Sequence[Sequence[float]], lengths: Sequence[int], width: int) -> list[list[float]]:
        """The rows of all ranks, one behind the other: rank i has `lengths[i]` of them, all of this width."""
        most = max(lengths)
        filled = [number for row in own for number in row]
        filled += [0.0] * (most * width - len(filled))
        return [
            numbers[i * width : (i + 1) * width]
            for numbers, length in zip(self.numbers(filled), lengths, strict=True)
            for i in range(length)
        ]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Over the ranks, in place."""
        if self.size > 1:
            works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]
            for work in works:
                if work is not None:
                    work.wait()


def by_rank(values: Sequence[Any]) -> str:
    """Values, each with its rank, for a message."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
