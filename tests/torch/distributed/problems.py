"""The little problems that the tests of windows over several ranks train, and their oracle.

The oracle on each rank is a plain model that sees all ranks' rows of a window at once.
"""

import contextlib
import copy  # no postponed annotations here: DDP reads those of its hooks
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error

Rows = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]
SIX = [[4, 3, 2, 5, 4, 4], [2, 5, 1, 2, 2, 3]]
"""Rows of each rank's micro-batches."""
SYNCS = "window", "micro_batch"
SHARDS = torch.__version__ >= "2.13"
"""Whether FSDP2 is not refused."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](model.parameters())


def slowly(quick: Any, slow: Any) -> list[Any]:
    """Parameters of a test, some of which `make test-slow` runs."""
    return [
        *quick,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in slow),
    ]


def network(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    return cross_entropy(model(rows[0]), rows[1])


def data(sizes: Sequence[Sequence[int]], epoch: int = 0, dtype: torch.dtype = torch.float64) -> list[list[Rows]]:
    """Micro-batches of these sizes for each rank; the same on every rank."""
    found = []
    for rank, own in enumerate(sizes):
        drawn = torch.Generator().manual_seed(100 * epoch + rank)
        rows = [
            (torch.randn(n, 5, generator=drawn, dtype=dtype), torch.randint(0, 3, (n,), generator=drawn)) for n in own
        ]
        found.append(rows)
    return found


def windows(ranks: Sequence[Sequence[Rows]], steps: int) -> list[list[Rows]]:
    """The micro-batches of each window, those of all ranks together."""
    count = max(-(-len(own) // steps) for own in ranks)
    return [[rows for own in ranks for rows in own[w * steps : (w + 1) * steps]] for w in range(count)]


def concatenated(window: Sequence[Rows]) -> Rows:
    return torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])


class Oracle:
    """One process that sees all rows at once."""

    def __init__(self, model: nn.Module, optimizer: str = "sgd", clip: float | None = None) -> None:
        self.model, self.clip, self.updates = copy.deepcopy(model), clip, 0
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def update(self, rows: Any, loss: Callable[..., Tensor] = loss_of) -> float:
        """Make an update. Returns the loss before it."""
        self.optimizer.zero_grad()
        value = loss(self.model, rows)
        value.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.updates += 1
        return value.item()

    def see(self, ranks: Sequence[Sequence[Rows]], steps: int, loss: Callable[..., Tensor] = loss_of) -> None:
        """Make the update of each window of these micro-batches, each time with all ranks' rows at once."""
        for window in windows(ranks, steps):
            self.update(concatenated(window), loss)

    def check(self, model: nn.Module, bound: float = FLOAT64) -> None:
        """This model has made the same updates."""
        error = relative_error(whole(model), self.model.parameters())
        assert error <= bound


def wrap(engine: str, model: Any, steps: Any = 2, how: Any = None, optimizer: str = "sgd", **keywords: Any) -> Any:
    """The model over all ranks, and a wrapped optimizer."""
    used = spread(engine, model, **(how or {}))
    return used, Optimizer(OPTIMIZERS[optimizer](used.parameters()), steps=steps, model=used, **keywords)


def mesh(*shape: int) -> Any:
    """Of all ranks; over four, two replicas of a model in two shards."""
    shape = shape or ((2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(),))
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model: Any, *parts: Any, **how: Any) -> Any:
    """Parts of a model, its linear layers if none is named, and what is left of it."""
    how = {"mesh": mesh(*how.pop("shape", ())), **how}
    for part in parts or [part for part in model if isinstance(part, nn.Linear)]:
        fully_shard(part, **how)
    return fully_shard(model, **how)


def spread(engine: str, model: Any, **how: Any) -> Any:
    if engine == "ddp":
        return DistributedDataParallel(model, **how)
    if engine == "fsdp2":
        return shard(model, **how)
    if engine == "fsdp2 at once":
        return fully_shard(model, **how)
    if engine == "fsdp2 nested":
        return shard(model, model.trunk, *model.heads, **how)
    for place in ("0", "2"):  # a list of parts, each by itself
        part = model.get_submodule(place)
        model.register_module(place, DistributedDataParallel(part) if engine == "ddp parts" else fully_shard(part))
    return model


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters, those of a sharded model put together."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def train_on(model: Any, optimizer: Optimizer, batches: Any, way: str = "plain", scaler: Any = None) -> None:
    """The user's loop, plain ("unscaled" by `unscale_` as windows close), or with `optimizer.backward`: weighed by rows
    ("scaled", too)."""
    for rows in batches:
        optimizer.zero_grad()
        loss = loss_of(model, rows) if scaler is None else scaler.scale(loss_of(model, rows))
        if way in ("weighed", "scaled"):
            optimizer.backward(loss, weight=len(rows[0]))
        else:
            loss.backward()
        if scaler is None:
            optimizer.step()
        else:
            if way == "unscaled" and optimizer.closes_next:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


def step_of(model: Any, optimizer: str = "sgd", parameters: Any = None, **keywords: Any) -> TrainStep:
    """A TrainStep in micro-batches of 4 rows that is not verified, if nothing else is asked for."""
    given = {} if keywords.get("compute_loss") else {"loss_fn": nn.CrossEntropyLoss()}
    size = "auto" if "max_tokens" in keywords else 4
    keywords = {**given, "micro_batch_size": size, "verify": False, **keywords}
    parameters = model.parameters() if parameters is None else parameters
    return TrainStep(model, OPTIMIZERS[optimizer](parameters), **keywords)


def check_steps(
    rank: int, step: TrainStep, oracle: Oracle, ranks: Any, loss: Any = loss_of, bound: float = FLOAT64
) -> None:
    """A TrainStep makes the oracle's updates, each of a batch of all ranks, and returns its losses."""
    for batches in zip(*ranks, strict=True):
        own, named = batches[rank], isinstance(batches[rank], dict)
        rows = {n: torch.cat([b[n] for b in batches]) for n in own} if named else concatenated(batches)
        expected = oracle.update(rows, loss)
        found = (step(own) if named else step(*own)).item()
        assert abs(found - expected) <= bound * abs(expected)
    oracle.check(step.model, bound)


def error_of(action: Callable[[], Any]) -> str:
    """What this raises; empty where it raises nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


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


class Heads(nn.Module):
    """A trunk, and a head that the batch chooses; another one never has a turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 7).double()
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3)).double()

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


class NoMemory(nn.Module):
    """Identity that runs out of memory with more than so many rows, in its forward or its backward pass."""

    def __init__(self, rows: int = 999, backward: bool = False) -> None:
        super().__init__()
        self.rows, self.backward, self.failures, self.error = rows, backward, 0, torch.OutOfMemoryError("no memory")

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            x = x * 1
            x.register_hook(lambda gradient: self.check(len(gradient), True))
        self.check(len(x), False)
        return x

    def check(self, rows: int, backward: bool) -> None:
        if rows > self.rows and backward == self.backward:
            self.failures += 1
            raise self.error


class Fragile(nn.Module):
    """Layers with places in between where memory may run out, dropout, and a buffer that moves."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise([5, 7, 6, 3])).double()
        self.places = nn.ModuleList(NoMemory() for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer, place in zip(self.layers, self.places):
            x = self.dropout(torch.tanh(layer(place(x))))
        return self.places[-1](x)


class Tagger(nn.Module):
    """Tags each token by itself, with an embedding and a head; computes its loss, or returns what it is made of."""

    def __init__(self, own_loss: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20)
        self.place, self.own_loss = NoMemory(), own_loss
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Any:
        hidden = torch.tanh(self.middle(self.embedding(batch["input_ids"])))
        found = self.head(self.place(hidden.flatten(0, 1)).view_as(hidden))
        return token_mean(found, batch) if self.own_loss else found


def token_mean(found: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def tagged(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch)
    return found if found.dim() == 0 else token_mean(found, batch)


TAGGED: dict[str, Any] = {"compute_loss": tagged, "weight": lambda batch: (batch["labels"] != -100).sum()}
LENGTHS = [[16, 15, 9, 12, 16, 14, 3, 11], [2, 3, 1, 5, 4, 2]]
"""Of the rows of a Tagger, on each rank."""


def text(lengths: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(16) < torch.tensor(lengths, dtype=torch.long)[:, None]).long()
    ids = torch.randint(1, 20, (len(lengths), 16), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def reducing(note: Callable[[int], Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, which notes the elements that are reduced."""
    note(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@contextlib.contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Counts reduce-scatters, all-gathers and all-reduces of gradients."""
    counts = Counter[str]()
    names = ("reduce_scatter_single", "all_reduce", "all_gather_single") if SHARDS else ("all_reduce",)

    def call(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or args[0].is_floating_point():  # which parameters were used are integers
            counts[name.removesuffix("_single")] += 1
        return function(*args, **kwargs)

    with contextlib.ExitStack() as patches:
        for name in names:
            counting = functools.partial(call, name, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, counting))
        yield counts
