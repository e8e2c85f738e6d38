"""What each rank does in the tests of `blocks` on several ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum.core.sizes import FixedSize, Rows
from gradaccum.torch import TrainStep
from gradaccum.torch.layers.blocks import Blocks, find_blocks
from tests.reference import relative_error
from tests.torch.distributed.problems import (
    OPTIMIZERS,
    Collectives,
    Oracle,
    concatenated,
    data,
    loss_of,
    whole,
    windows,
)
from tests.torch.distributed.together_cases import NoMemory
from tests.torch.layers.problems import in_blocks


class Block(nn.Module):
    """What all blocks are given besides: a scale that is learned, outside of them."""

    def __init__(self, inner: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, inner), nn.Linear(inner, 6), nn.Dropout(dropout)
        self.place = NoMemory()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.dropout(self.down(torch.tanh(self.up(self.place(x)))))


class Network(nn.Module):
    """A stem, blocks with something in between, and a head."""

    def __init__(self, dropout: float = 0.0, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.scale = nn.Linear(5, 1)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        x = self.stem(x)
        for layer in self.layers:
            x = self.norm(layer(x, scale))
        return self.head(x)


def sharded_by_blocks(model: Network, shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    shape = shape or ((2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(),))
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_together(model: Network, *parts: str) -> Any:
    """Some parts are sharded together; the other blocks by themselves."""
    chosen = [model.get_submodule(part) for part in parts]
    fully_shard(chosen)
    for layer in model.layers:
        if layer not in chosen:
            fully_shard(layer.up)  # a part of a block by itself
            fully_shard(layer)
    return fully_shard(model)


def step_of(model: nn.Module, optimizer: str = "sgd", **options: Any) -> TrainStep:
    options = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 3, "blocks": "layers", "verify": False, **options}
    if "compute_loss" in options:
        del options["loss_fn"]
    trained = [p for p in model.parameters() if p.requires_grad]
    return TrainStep(model, OPTIMIZERS[optimizer](trained), **in_blocks(options))


SIZES = [[8, 9], [5, 0]]
EVEN = [[6, 9], [6, 9]]
"""Without blocks, all ranks cut their rows into as many micro-batches."""


def against_the_large_batch(
    rank: int,
    build: Any = None,
    optimizer: str = "adam",
    sizes: Any = SIZES,
    shard: Any = None,
    parts: Any = (),
    loss: Any = loss_of,
    **options: Any,
) -> tuple[float, float, list[dict[str, int]]]:
    """The error of the parameters after some updates, the worst of the losses, and what was sent in each update.

    `shard`: options of `fully_shard`, or "ddp"; `parts` are sharded together.
    """
    model = Network() if build is None else build()
    oracle = Oracle(model, optimizer, options.get("clip_grad_norm"))
    if shard == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = sharded_together(model, *parts) if parts else sharded_by_blocks(model, **(shard or {}))
    step = step_of(model, optimizer, **options)
    ranks, worst, sent = data(sizes), 0.0, []
    for i, window in enumerate(windows(ranks, 1)):
        rows = concatenated(window)
        expected = loss(oracle.model, rows).item()
        oracle.update(rows, loss)
        with Collectives() as collectives:
            worst = max(worst, abs(step(*ranks[rank][i]).item() - expected) / expected)
        sent.append(dict(collectives.counts))
    return oracle.error(model), worst, sent


def with_blocks_and_without(
    rank: int, build: Any, policy: dict[str, torch.dtype] | None = None
) -> tuple[float, list[Tensor]]:
    """How far sharded blocks are from the same sharded model without them; and its parameters."""
    found = []
    for blocks in ("layers", None):
        model = build()
        how = {} if policy is None else {"mp_policy": MixedPrecisionPolicy(**policy)}
        model = sharded_by_blocks(model if policy is None else model.float(), **how)
        step = step_of(model, "sgd", blocks=blocks)
        torch.manual_seed(rank)
        for x, y in data(EVEN)[rank]:
            step(x if policy is None else x.float(), y)
        found.append([p.detach().clone() for p in whole(model)])
    return relative_error(*found), found[0]


def dropping_out() -> Network:
    return Network(dropout=0.5)


def in_float64() -> list[Tensor]:
    """What one process makes of the batches of `with_blocks_and_without`."""
    oracle = Oracle(Chain(), "sgd")
    oracle.see(data(EVEN), 1)
    return [p.detach() for p in oracle.model.parameters()]


def whole_at_once(rank: int, sync: str) -> int:
    """How many blocks are whole at most while one runs."""
    model, found = sharded_by_blocks(Network(blocks=5)), list[int]()
    for layer in model.layers:
        layer.place.register_forward_pre_hook(
            lambda *_: found.append(sum(not isinstance(each.up.weight, DTensor) for each in model.layers))
        )
    step = step_of(model, sync=sync)
    for rows in data(SIZES)[rank]:
        step(*rows)
    return max(found)


class Chain(Network):
    """Each parameter is used once, so that gradients in bfloat16 are added up between micro-batches only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, x.new_ones(()))
        return self.head(self.norm(x)) + self.scale(x.detach()[:, :5])


def tied() -> Network:
    """Two blocks share a weight."""
    model = Network()
    model.layers[2].down.weight = model.layers[0].down.weight
    return model


def frozen() -> Network:
    """The first block, and the bias of the last one, stay as they are."""
    model = Network()
    model.layers[0].requires_grad_(False)
    model.layers[2].down.bias.requires_grad_(False)
    return model


def weighed(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over some rows, which is told with the loss."""
    weights = (x[:, 0] > 0).double()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1), weights.sum()


def weighed_rows(model: nn.Module, rows: Any) -> Tensor:
    return weighed(model, *rows)[0]


TOLD = {"compute_loss": weighed, "loss": weighed_rows, "micro_batch_size": 1}
"""Some micro-batches weigh nothing."""


def loss_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return weighed(model, x, y)[0]


def weight_of(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, 0] > 0).sum()


WEIGHED = {**TOLD, "compute_loss": loss_alone, "weight": weight_of}


def with_a_scaler(rank: int, **options: Any) -> tuple[float, list[float]]:
    """The second batch overflows on rank 1, and no rank makes its update."""
    model = Network()
    oracle = Oracle(model)
    model = sharded_by_blocks(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    step, ranks, scales = step_of(model, scaler=scaler, **options), data([[8, 3, 9], [5, 7, 0]]), []
    for i, rows in enumerate(windows(ranks, 1)):
        if i == 1 and rank == 1:
            ranks[1][1][0][3, 0] = float("inf")
        if i != 1:
            oracle.update(concatenated(rows))
        step(*ranks[rank][i])
        scales.append(scaler.get_scale())
    return oracle.error(model), scales


def out_of_memory(rank: int, where: list[tuple[int, bool]], **options: Any) -> list[tuple[float, int]]:
    """Rank 1 runs out of memory, in these blocks, forward or backward. Returns (error, size)."""
    found = []
    for place, backward in where:
        model = Network()
        oracle = Oracle(model, "adam")
        model = sharded_by_blocks(model)
        if rank == 1:
            model.layers[place].place.rows, model.layers[place].place.backward = 2, backward
        step, ranks = step_of(model, "adam", micro_batch_size=4, **options), data([[8, 6], [7, 9]])
        oracle.see(ranks, 1)
        for rows in ranks[rank]:
            step(*rows)
        found.append((oracle.error(model), step.micro_batch_size or 0))
    return found


def fails(rank: int, what: str, **options: Any) -> tuple[str, float, float]:
    """Rank 1 fails in a batch, in a block's pass, or by a loss that is NaN. A batch that is fine follows.

    Returns:
        What each rank says, how far its parameters have moved by then, and the error after the next batch.
    """
    model = Network()
    oracle = Oracle(model)
    model = sharded_by_blocks(model)
    step, ranks, said = step_of(model, **options), data([[6, 5], [7, 4]]), ""
    before, (x, y) = [p.detach().clone() for p in whole(model)], ranks[rank][0]
    place = model.layers[0 if what == "memory" else 1].place
    if rank == 1 and what == "nan":
        x[0, 0] = float("nan")
    elif rank == 1:
        place.rows, place.backward = 0, what != "forward"
        place.error = place.error if what == "memory" else ArithmeticError("one rank's own")
    try:
        step(x, y)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    moved, place.rows = relative_error(whole(model), before), 999
    oracle.update(concatenated([own[1] for own in ranks]))
    if moved == 0:
        step(*ranks[rank][1])
    return said, moved, oracle.error(model)


def synchronised() -> Network:
    model = Network()
    model.layers[1].dropout = nn.SyncBatchNorm(6, dtype=torch.float64)
    return model


class Borrowing(Network):
    """Between the blocks, it uses the weights of a later one."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        x = self.stem(x)
        for layer in self.layers:
            x = self.norm(layer(x, scale)) + self.layers[-1].down.bias
        return self.head(x)


def refused(rank: int) -> dict[str, str]:
    """What is said of options and models that don't go with blocks on several ranks."""
    rows, in_backward = data(SIZES)[rank][0], Blocks("auto", update="in_backward")
    given: dict[str, Any] = {
        "on": lambda: step_of(sharded_by_blocks(Network()), on="cpu"),
        "batch_norm": lambda: step_of(sharded_by_blocks(synchronised()), batch_norm="micro"),
        "fsdp1": lambda: find_blocks(FullyShardedDataParallel(Network(), device_id=torch.device("cpu")), "auto"),
        "ddp": lambda: step_of(DistributedDataParallel(Network()), blocks=in_backward),
        "tied apart": lambda: step_of(sharded_by_blocks(tied()))(*rows),
        "borrowed": lambda: step_of(sharded_by_blocks(Borrowing()))(*rows),
    }
    said = {}
    for name, make in given.items():
        try:
            make()
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


class Spare(Network):
    """The second block has a parameter that no row uses, and one that only some do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = SpareBlock().double()


class SpareBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.nobody = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = super().forward(x, scale)
        return x * self.some if len(x) == 2 else x


def unused(rank: int, policy: dict[str, torch.dtype] | None = None, **options: Any) -> float:
    """Adam with weight decay moves parameters whose gradient is zero, and none without a gradient."""
    model, optimizer = Spare(), "sgd" if policy else "adamw"
    oracle = Oracle(model, optimizer)
    model = sharded_by_blocks(model, **({"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}))
    step, ranks = step_of(model, optimizer, micro_batch_size=2, **options), data([[2, 3], [4, 5]])
    for i, window in enumerate(windows(ranks, 1)):
        oracle.optimizer.zero_grad()
        rows = sum(len(y) for _, y in window)
        for x, y in window:  # as the step cuts them
            for part in [slice(a, b) for a, b in zip(*cut(len(y)))]:
                loss_of(oracle.model, (x[part], y[part])).mul((part.stop - part.start) / rows).backward()
        oracle.optimizer.step()
        step(*ranks[rank][i])
    return oracle.error(model)


def cut(rows: int) -> tuple[list[int], list[int]]:
    ends = [piece.rows.stop for piece in Rows(FixedSize(2), rows)]  # type: ignore[union-attr]  # slices
    return [0, *ends[:-1]], ends
