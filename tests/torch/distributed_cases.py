"""What each rank does in the tests of windows over several ranks. Every case compares itself with one ordinary process.

The oracle on each rank is a plain model that sees all ranks' rows of a window at once.
"""

import copy  # no postponed annotations here: DDP reads those of its hooks
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch.optim import Optimizer
from tests.reference import relative_error

Rows = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    return nn.functional.cross_entropy(model(rows[0]), rows[1])


def micro_batches(sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> list[Rows]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 5, generator=generator, dtype=dtype), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def data(sizes: Sequence[Sequence[int]], epoch: int = 0, dtype: torch.dtype = torch.float64) -> list[list[Rows]]:
    """Micro-batches of these sizes for each rank; the same on every rank."""
    return [micro_batches(own, seed=100 * epoch + rank, dtype=dtype) for rank, own in enumerate(sizes)]


def windows(ranks: Sequence[Sequence[Rows]], steps: int) -> list[list[Rows]]:
    """The micro-batches of each window, those of all ranks together."""
    count = max(-(-len(own) // steps) for own in ranks)
    return [[rows for own in ranks for rows in own[w * steps : (w + 1) * steps]] for w in range(count)]


def concatenated(window: Sequence[Rows]) -> Rows:
    return torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])


class Count:
    """Counts reductions: once for each bucket that DDP hands to the communication hook."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.buckets = 0
        self.elements = 0
        model.register_comm_hook(self, _counting)

    def take(self) -> int:
        count, self.buckets = self.buckets, 0
        return count


def _counting(state: Count, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.buckets += 1
    state.elements += bucket.buffer().numel()
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Oracle:
    """One process that sees all rows at once."""

    def __init__(self, model: nn.Module, optimizer: str = "sgd", clip: float | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.clip = clip

    def update(self, rows: Rows, loss: Callable[..., Tensor] = loss_of) -> None:
        self.optimizer.zero_grad()
        loss(self.model, rows).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def error(self, model: nn.Module) -> float:
        return relative_error(list(model.parameters()), list(self.model.parameters()))


def train(
    rank: int,
    sizes: Sequence[Sequence[int]],
    steps: int,
    way: str = "batches",
    optimizer: str = "sgd",
    epochs: int = 2,
    ddp: dict[str, Any] | None = None,
    clip: float | None = None,
    hook_first: bool = True,
    **keywords: Any,
) -> tuple[float, int, int]:
    """Train on ragged rows. Returns (error, reductions, updates)."""
    model = network()
    oracle = Oracle(model, optimizer, clip)
    replica = DistributedDataParallel(model, **(ddp or {}))
    count = Count(replica) if hook_first else None
    wrapped = Optimizer(
        OPTIMIZERS[optimizer](replica.parameters()), steps=steps, model=replica, clip_grad_norm=clip, **keywords
    )
    count = count or Count(replica)
    error = 0.0
    for epoch in range(epochs):
        ranks = data(sizes, epoch)
        for window in windows(ranks, steps):
            oracle.update(concatenated(window))
        loader = wrapped.batches(ranks[rank]) if way.startswith("batches") else ranks[rank]
        for rows in loader:
            wrapped.zero_grad()
            loss = loss_of(replica, rows)
            if way == "batches":
                loss.backward()
            elif way == "batches, backward":
                wrapped.backward(loss)
            else:
                wrapped.backward(loss, weight=len(rows[0]))
            wrapped.step()
        if way == "plain":
            wrapped.flush()
        error = max(error, oracle.error(model))
    return error, count.buckets, wrapped.updates
