"""The little problems that the tests of windows over several ranks train, and their oracle.

The oracle on each rank is a plain model that sees all ranks' rows of a window at once.
"""

import copy  # no postponed annotations here: DDP reads those of its hooks
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch.optim import Optimizer
from tests.reference import relative_error

Rows = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
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

    def see(self, ranks: Sequence[Sequence[Rows]], steps: int, loss: Callable[..., Tensor] = loss_of) -> None:
        """Make the update of each window of these micro-batches, each time with all ranks' rows at once."""
        for window in windows(ranks, steps):
            self.update(concatenated(window), loss)

    def error(self, model: nn.Module) -> float:
        return relative_error(whole(model), list(self.model.parameters()))


def wrap(model: nn.Module, steps: Any = 2, ddp: dict[str, Any] | None = None, **keywords: Any) -> tuple[Any, Optimizer]:
    return wrap_over("ddp", model, steps, ddp, **keywords)


def wrap_over(
    engine: str, model: nn.Module, steps: Any, how: Any = None, optimizer: str = "sgd", **keywords: Any
) -> tuple[Any, Optimizer]:
    used = spread(engine, model, how or {})
    return used, Optimizer(OPTIMIZERS[optimizer](used.parameters()), steps=steps, model=used, **keywords)


def shard(model: nn.Module, mesh: Any = None, **keywords: Any) -> nn.Module:
    for part in model:  # type: ignore[attr-defined]
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh, **keywords)
    return fully_shard(model, mesh=mesh, **keywords)


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters, those of a sharded model put together."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def spread(engine: str, model: nn.Module, how: dict[str, Any]) -> Any:
    """The model over all ranks."""
    if engine.startswith("ddp"):
        return DistributedDataParallel(model, **how)
    if engine == "fsdp2 at once":
        return fully_shard(model, **how)
    if engine == "fsdp2 nested":
        for part in [model.trunk, *model.heads, model]:  # type: ignore[union-attr,list-item,misc]
            fully_shard(part)
        return model
    if engine == "fsdp2 parts":  # a list of parts, each sharded by itself
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer)
        return model
    if engine == "fsdp2 hybrid":
        how = {"mesh": dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return shard(model, **{"mesh": mesh, **how})


def built(sync: str = "window", optimizer: str = "sgd", steps: int = 3, model: Any = None) -> tuple[Any, Optimizer]:
    """Sharded over all ranks; over four, in two replicas."""
    engine = "fsdp2 hybrid" if dist.get_world_size() == 4 else "fsdp2"
    return wrap_over(engine, network() if model is None else model, steps, None, optimizer, sync=sync)


def train_on(
    model: Any, optimizer: Optimizer, batches: Any, weighed: bool = False, loss: Callable[..., Tensor] = loss_of
) -> None:
    """The user's loop; `weighed`: with `optimizer.backward` and the rows as weights."""
    for rows in batches:
        optimizer.zero_grad()
        if weighed:
            optimizer.backward(loss(model, rows), weight=len(rows[0]))
        else:
            loss(model, rows).backward()
        optimizer.step()


def scaled(
    rank: int,
    model: nn.Module,
    optimizer: Optimizer,
    oracle: Oracle,
    overflow_at: tuple[int, int] | None,
    interval: int,
) -> list[float]:
    """An epoch of windows of three under a GradScaler, with the oracle beside it. Returns the scale after each."""
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    ranks = data([[4, 3, 2] * 4, [2, 2, 5] * 4] * (dist.get_world_size() // 2))
    for w, window in enumerate(windows(ranks, 3)):
        if overflow_at is None or overflow_at[1] // 3 != w:
            oracle.update(concatenated(window))
    scales = []
    for i, rows in enumerate(optimizer.batches(ranks[rank])):
        optimizer.zero_grad()
        loss = loss_of(model, rows) * (float("inf") if (rank, i) == overflow_at else 1.0)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if i % 3 == 2:
            scales.append(grad_scaler.get_scale())
    return scales


def lines_of(action: Callable[[], Any]) -> list[str]:
    """What is logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradaccum").addHandler(handler)
    try:
        action()
    finally:
        logging.getLogger("gradaccum").removeHandler(handler)
    return lines


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


class Collectives:
    """Counts reduce-scatters and all-reduces of gradients."""

    def __init__(self) -> None:
        self.counts = {"reduce_scatter": 0, "all_reduce": 0, "all_gather": 0}

    def __enter__(self) -> "Collectives":
        names = ("reduce_scatter_single", "all_reduce", "all_gather_single")
        if torch.__version__ < "2.13":
            names = ("all_reduce",)
        self._kept = {name: getattr(dist, name) for name in names}

        def counting(name: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.counts[name] += 1
                return function(*args, **kwargs)

            return call

        for name in names:
            setattr(dist, name, counting(name.removesuffix("_single"), self._kept[name]))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, function in self._kept.items():
            setattr(dist, name, function)
