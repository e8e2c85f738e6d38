"""What each rank does in the tests of `blocks` on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import TrainStep
from tests.reference import relative_error, torch_updates


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 6), nn.Sequential(*layers), nn.Linear(6, 3)).double()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _data(rows: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 5, dtype=torch.float64), torch.randint(3, (rows,))) for _ in range(3)]


def under_ddp(rank: int, sizes: list[int]) -> tuple[float, str]:
    """The error of three updates, and what is said of updates in backward."""
    model, reference, loss_fn = _network(), _network(), nn.CrossEntropyLoss()
    data = _data(sum(sizes))
    torch_updates(reference, _sgd(reference), data, lambda model, x, y: loss_fn(model(x), y))
    ddp = DistributedDataParallel(model)
    step = TrainStep(ddp, _sgd(ddp), loss_fn=loss_fn, micro_batch_size=2, blocks="auto")
    start = sum(sizes[:rank])
    for x, y in data:
        step(x[start : start + sizes[rank]], y[start : start + sizes[rank]])
    try:
        TrainStep(ddp, _sgd(ddp), loss_fn=loss_fn, micro_batch_size=2, blocks="auto", update="in_backward")
    except ValueError as error:
        return relative_error(model.parameters(), reference.parameters()), str(error)
    return float("nan"), ""


def sharded(rank: int) -> str:
    """What is said of a model of which parts are sharded."""
    model = _network()
    for layer in model.get_submodule("1"):  # type: ignore[attr-defined]  # a Sequential
        fully_shard(layer)
    try:
        TrainStep(model, _sgd(model), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2, blocks="1")
    except ValueError as error:
        return str(error)
    return ""
