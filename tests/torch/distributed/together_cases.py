"""What each rank does in the tests of TrainStep on a sharded model that may not fit: all ranks run passes together."""

import contextlib
import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import relative_error
from tests.torch.distributed.problems import (
    OPTIMIZERS,
    Oracle,
    concatenated,
    data,
    loss_of,
    network,
    shard,
    windows,
)

Where = Any
"""In a forward or a backward pass: before or behind which layer memory runs out."""


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
        sizes = [5, 7, 6, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)).double()
        self.places = nn.ModuleList(NoMemory() for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer, place in zip(self.layers, self.places):
            x = self.dropout(torch.tanh(layer(place(x))))
        return self.places[-1](x)


def sharded(model: Fragile, hybrid: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 2), ("replicate", "shard")) if hybrid else ((dist.get_world_size(),), None)
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_of(model: Any, optimizer: str = "sgd", **keywords: Any) -> TrainStep:
    arguments: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 4, "verify": False, **keywords}
    return TrainStep(model, OPTIMIZERS[optimizer](model.parameters()), **arguments)


def out_of_memory(
    rank: int, on: int, backward: bool, places: Any, sync: str = "window", sizes: Any = ((8, 6), (7, 9))
) -> list[tuple[float, float, int, int]]:
    """One rank runs out of memory, at each of these places. Returns (error, that of the losses, failures, size)."""
    found = []
    for place in places:
        model = Fragile()
        oracle = Oracle(model, "adam")
        fragile = sharded(model, hybrid=dist.get_world_size() == 4)
        if rank == on:
            fragile.places[place].rows, fragile.places[place].backward = 2, backward
        step = step_of(fragile, "adam", sync=sync)
        ranks, worst = data(sizes), 0.0
        for i, window in enumerate(windows(ranks, 1)):
            rows = concatenated(window)
            expected = loss_of(oracle.model, rows).item()
            oracle.update(rows)
            worst = max(worst, abs(step(*ranks[rank][i]).item() - expected) / expected)
        failures = sum(p.failures for p in fragile.places)
        found.append((oracle.error(fragile), worst, failures, step.micro_batch_size or 0))
    return found


def begun_again(rank: int) -> tuple[list[float], Tensor, float]:
    """Dropout and a buffer, after memory ran out on rank 1: as if the larger size had never been tried."""
    found = []
    for fails in (True, False):
        fragile = sharded(Fragile(dropout=0.5))
        if fails and rank == 1:
            fragile.places[3].rows, fragile.places[3].backward = 2, True
        step = step_of(fragile, micro_batch_size=4 if fails else 2)
        torch.manual_seed(rank)
        for rows in data([[4, 3], [4, 4]])[rank]:
            step(*rows)
        found.append((fragile, torch.get_rng_state(), fragile.calls.item()))
    (one, numbers, calls), (other, expected, _) = found
    error = relative_error(_whole(one), _whole(other))
    return [error, float((numbers != expected).sum())], numbers, calls


def _whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


def goes_on(rank: int, kind: str) -> tuple[str, float]:
    """An error on rank 1 that smaller micro-batches don't help, and then a batch that is fine. Returns both."""
    model = Fragile()
    oracle = Oracle(model)
    fragile = sharded(model)
    step = step_of(fragile)
    ranks = data([[6, 3], [5, 4]])
    place = fragile.places[1]
    message, reduces = "", torch.distributed.reduce_scatter_single
    if rank == 1:
        place.rows = 0
        place.backward = kind == "backward"
        if kind in ("forward", "backward"):
            place.error = ArithmeticError("one rank's own")
        if kind == "reduction":
            place.rows = 999
            allocate = fragile.layers[1]._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
            allocate.allocate = place_without_memory
    try:
        step(*ranks[rank][0])
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    if rank == 1:
        place.rows = 999
        if kind == "reduction":
            del allocate.allocate
    assert reduces is torch.distributed.reduce_scatter_single
    oracle.update(concatenated([own[1] for own in ranks]))
    step(*ranks[rank][1])
    return message, oracle.error(fragile)


def place_without_memory(*args: Any, **kwargs: Any) -> Tensor:
    raise torch.OutOfMemoryError("no memory for it")


def swallowed(rank: int) -> float:
    """Code of the user's that goes on after any error, and ends its pass by another one."""
    model = Fragile()
    oracle = Oracle(model)
    fragile = sharded(model)
    if rank == 1:
        fragile.places[1].rows = 2

    def stubborn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with contextlib.suppress(Exception) if rank == 0 else contextlib.nullcontext():
            return nn.functional.cross_entropy(m(x), y)
        return nn.functional.cross_entropy(m(x), y)

    step = step_of(fragile, loss_fn=None, compute_loss=stubborn)
    ranks = data([[6, 3], [5, 4]])
    oracle.see(ranks, 1)
    for rows in ranks[rank]:
        step(*rows)
    return oracle.error(fragile)


def at_random(rank: int, seed: int) -> float:
    """Memory runs out anywhere, on any rank, at any time; the update stays that of all rows."""
    draw = random.Random(seed)
    model = Fragile()
    oracle = Oracle(model, "adam")
    fragile = sharded(model, hybrid=dist.get_world_size() == 4)
    sync = draw.choice(["window", "micro_batch"])
    clip = draw.choice([None, 0.05])
    oracle.clip = clip
    step = step_of(fragile, "adam", sync=sync, micro_batch_size=draw.randint(2, 9), clip_grad_norm=clip)
    sizes = [[draw.choice([0, 1, 2, 5, 9, 13]) for _ in range(4)] for _ in range(dist.get_world_size())]
    sizes[0] = [max(size, 1) for size in sizes[0]]
    ranks = data(sizes, epoch=seed)
    for i, window in enumerate(windows(ranks, 1)):
        for r in range(dist.get_world_size()):
            place, rows, backward = draw.randrange(4), draw.randint(1, 12), draw.random() < 0.5
            if r == rank:
                for p in fragile.places:
                    p.rows = 999
                fragile.places[place].rows, fragile.places[place].backward = rows, backward
        rows_ = concatenated(window)
        oracle.update(rows_)
        step(*ranks[rank][i])
    return oracle.error(fragile)


def predicted(rank: int, sync: str, limits: Any) -> tuple[float, list[int], int, int]:
    """`"auto"`, on ranks of different memory. Returns (error, rows of its passes, size, most bytes of a pass)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 3)).double()
    oracle = Oracle(model)
    wide = shard(model)
    step = step_of(wide, micro_batch_size="auto", memory_limit=limits[rank], sync=sync)
    step.update._meter.live = lambda: 0  # type: ignore[method-assign]  # the tests' own process does not count
    seen = []
    wide.register_forward_pre_hook(lambda m, inputs: seen.append(len(inputs[0]) * (type(inputs[0]) is Tensor)))
    ranks = data([[64, 64], [64, 20]])
    oracle.see(ranks, 1)
    seen.clear()
    torch.manual_seed(rank)
    numbers = torch.get_rng_state()
    step(*ranks[rank][0])
    assert torch.equal(numbers, torch.get_rng_state())
    with LiveBytes() as live:
        step(*ranks[rank][1])
    return oracle.error(wide), [rows for rows in seen if rows], step.micro_batch_size or 0, live.peak


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
    return nn.functional.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


TAGGED: dict[str, Any] = {
    "loss_fn": None,
    "compute_loss": lambda m, batch: m(batch),
    "weight": lambda batch: (batch["labels"] != -100).sum(),
    "micro_batch_size": "auto",
}
LENGTHS = [16, 15, 9, 12, 16, 14, 3, 11], [2, 3, 1, 5, 4, 2]


def tag(rank: int, step: TrainStep, oracle: Oracle, update: int) -> None:
    """An update of long rows and of short ones, in turns."""
    batches = [text(own, 10 * update + r) for r, own in enumerate(LENGTHS[:: 1 - 2 * update])]
    rows: Any = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    oracle.update(rows, lambda m, batch: m(batch))
    step(batches[rank])


def text(lengths: Any, seed: int, columns: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(columns) < torch.tensor(lengths, dtype=torch.long)[:, None]).long()
    ids = torch.randint(1, 20, (len(lengths), columns), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(rank: int, fits: int, groups: int | None = None) -> tuple[float, list[int]]:
    """`max_tokens`, on ranks of long and of short rows; rank 1 has memory for so many tokens only."""
    from torch.distributed.fsdp import fully_shard

    model = Tagger()
    oracle = Oracle(model, "adam")
    tokens: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0]["input_ids"].numel()))
    for part in (model.embedding, model.head, model):
        fully_shard(part)
    model.place.rows = fits if rank == 1 else 999
    step = step_of(model, "adam", **TAGGED, max_tokens=48, verify=True, groups=groups)
    for update in range(2):
        tokens.clear()
        tag(rank, step, oracle, update)
    return oracle.error(model), tokens


def cannot_be_predicted(rank: int) -> str:
    """A loss that asks rank 1's rows for a value, which fake tensors don't have."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(m(x), y) * (1.0 if rank == 0 or x.sum().item() > 1 else 2.0)

    step = step_of(shard(network()), loss_fn=None, compute_loss=loss, micro_batch_size="auto", memory_limit="1GiB")
    try:
        step(*data([[8]] * 2)[rank][0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def replicated(rank: int, kind: str) -> float:
    """The same on DistributedDataParallel: ranks search, pack and run out of memory each for itself."""
    model = Tagger()
    oracle = Oracle(model, "adam")
    if fragile := rank == (kind == "auto"):
        model.place.rows = 60 if kind == "auto" else 20
    step = step_of(DistributedDataParallel(model), "adam", **TAGGED, max_tokens=None if kind == "auto" else 48)
    for update in range(2):
        tag(rank, step, oracle, update)
    assert kind == "auto" or (model.place.failures > 0) == fragile  # how far "auto" climbs depends on the clock
    return oracle.error(model)
