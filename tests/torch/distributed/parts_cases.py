"""What each rank does in the tests of models whose ranks use different parts of it, and of unusual ways to run DDP."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch.optim import Optimizer
from tests.reference import relative_error
from tests.torch.distributed.problems import OPTIMIZERS, data, loss_of, network, whole


class Heads(nn.Module):
    """A trunk, and a head that the batch chooses; another one never has a turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 7).double()
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3)).double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def head_loss(model: Any, rows: Any, head: int) -> Tensor:
    return nn.functional.cross_entropy(model(rows[0], head), rows[1])


def heads_oracle(model: nn.Module, ranks: Any, chosen: Any, weights: Any, steps: int, optimizer: str) -> nn.Module:
    """One process that sees each window's micro-batches of all ranks."""
    model = copy.deepcopy(model)
    plain = OPTIMIZERS[optimizer](model.parameters())
    for first in range(0, max(map(len, ranks)), steps):
        places = [(r, i) for r, own in enumerate(ranks) for i in range(first, min(first + steps, len(own)))]
        total = sum(weights[r][i] for r, i in places)
        plain.zero_grad()
        for r, i in places:
            if weights[r][i]:
                (head_loss(model, ranks[r][i], chosen[r][i]) * (weights[r][i] / total)).backward()
        plain.step()
    return model


def heads(
    rank: int, weights: Any, chosen: Any, engine: str, way: str, optimizer: str = "sgd", **keywords: Any
) -> float:
    """A head for each micro-batch; some micro-batches weigh nothing on one rank."""
    model = Heads()
    ranks = data([[4] * len(own) for own in weights])
    oracle = heads_oracle(model, ranks, chosen, weights, 2, optimizer)
    used: Any = model
    if engine == "ddp":
        used = DistributedDataParallel(model, find_unused_parameters=True, **keywords)
    elif engine == "fsdp2":
        fully_shard(model)
    else:
        for part in [model.trunk, *model.heads, model]:
            fully_shard(part)
    sync = "micro_batch" if "micro_batch" in way else "window"
    wrapped = Optimizer(OPTIMIZERS[optimizer](model.parameters()), steps=2, model=used, sync=sync)
    loader: Any = list(zip(ranks[rank], chosen[rank], weights[rank]))
    for rows, head, weight in wrapped.batches(loader, weight=lambda b: b[2]) if "batches" in way else loader:
        wrapped.zero_grad()
        loss = head_loss(used, rows, head)
        if "backward" in way:
            wrapped.backward(loss, weight=weight)
        else:
            loss.backward()
        wrapped.step()
    return relative_error(whole(model), list(oracle.parameters()))


def short_with_scaler(rank: int, sizes: Any, way: str = "batches", sync: str = "window") -> int:
    model = network()
    fully_shard(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=2, model=model, sync=sync)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for rows in optimizer.batches(data(sizes)[rank]):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, rows))
        loss.backward() if way == "batches" else optimizer.backward(loss)
        scaler.step(optimizer)
        scaler.update()
    return optimizer.updates
