"""The rows that are compared with each other: one process's, or those of all ranks of a group.

Every rank keeps its own rows of `a`. The ranks' rows of `b` visit, one rank's at a time, while the next ones are under
way: but for a few numbers per row, memory does not grow with the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AllRanks", "SingleProcess"]


class SingleProcess:
    """One process: its rows of `b` are all there are.

    Attributes:
        rank: This process's number.
        rows: Rows of `a` of each rank.
        columns: Rows of `b` of each rank.
        starts: The numbers of each rank's first row of `b` among all ranks'.
        device: Where the rows are.
    """

    rank = 0

    def __init__(self, rows: Sequence[int], columns: Sequence[int], device: torch.device) -> None:
        self.rows, self.columns, self.device = list(rows), list(columns), device
        self.starts = [0, *itertools.accumulate(columns)][:-1]

    def blocks(self, b: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank's rows of `b`, with its number."""
        yield 0, b

    def gathered(self, column: Tensor) -> Tensor:
        """All ranks' numbers, one per row of `b`."""
        return column

    def maximum(self, tensor: Tensor) -> Tensor:
        """Elementwise over ranks."""
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        return tensor

    def send_back(self, gradient: Tensor, owner: int) -> Tensor | None:
        """The gradient of a rank's rows of `b`, added up over ranks; None on all other ranks."""
        return gradient


class AllRanks(SingleProcess):
    """The ranks of a process group."""

    def __init__(
        self, group: dist.ProcessGroup, rows: Sequence[int], columns: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(rows, columns, device)
        self.group, self.rank = group, dist.get_rank(group)
        self._global = [dist.get_global_rank(group, number) for number in range(len(rows))]

    def blocks(self, b: Tensor) -> Iterator[tuple[int, Tensor]]:
        sent = self._send(b, 0)
        for owner in range(len(self.columns)):
            block, work = sent
            if owner + 1 < len(self.columns):
                sent = self._send(b, owner + 1)
            if work is not None:
                work.wait()
            yield owner, block

    def _send(self, tensor: Tensor, owner: int) -> tuple[Tensor, dist.Work | None]:
        if owner == self.rank:
            block = tensor.detach().contiguous()
        else:
            block = tensor.new_empty(self.columns[owner], *tensor.shape[1:])
        if not block.numel():
            return block, None
        # As bytes, since not every backend knows every type of numbers.
        return block, dist.broadcast(block.view(torch.uint8), self._global[owner], group=self.group, async_op=True)

    def gathered(self, column: Tensor) -> Tensor:
        return torch.cat([block for _, block in self.blocks(column)])

    def maximum(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def total(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def send_back(self, gradient: Tensor, owner: int) -> Tensor | None:
        if gradient.numel():
            dist.reduce(gradient, self._global[owner], group=self.group)
        return gradient if owner == self.rank else None
