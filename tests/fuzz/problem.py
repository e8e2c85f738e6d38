"""What the fuzzer trains: a small model, its batches, its losses, and one ordinary step as the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch import chunked
from tests.fuzz.scenario import MicroBatch, Scenario

__all__ = ["OPTIMIZERS", "Faulty", "Injected", "Model", "loader_of", "loss_of", "rows_of", "update"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}

CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)


class Injected(Exception):
    """An error in the middle of a pass."""


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Faulty) -> Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fault.strike("backward", len(gradients[0]))
        return gradients[0], None


class Faulty(nn.Module):
    """Raises once in a forward or a backward pass, or runs out of memory with more than so many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.most = "", 10**9

    def forward(self, x: Tensor) -> Tensor:
        self.strike("forward", len(x))
        return _Fault.apply(x, self)

    def strike(self, here: str, rows: int) -> None:
        if self.where == here:
            self.where = ""
            raise Injected
        if rows > self.most:
            raise torch.OutOfMemoryError("no memory")


class Model(nn.Module):
    """A trunk, heads that the batch chooses, and a layer that is never used."""

    def __init__(self, scenario: Scenario, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(scenario.seed % 1000)
        trunk: nn.Module = nn.Sequential(nn.Linear(5, 6, bias=not scenario.norm), nn.Tanh())
        if scenario.norm:
            trunk = nn.Sequential(trunk[0], nn.BatchNorm1d(6), nn.Tanh())  # type: ignore[index]
        self.trunk = chunked(trunk, scenario.chunk) if scenario.chunk and not alone and not scenario.norm else trunk
        self.fault = Faulty()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(1 if scenario.engine == "ddp" else 2))
        if scenario.unused:
            self.never = nn.Linear(2, 2)
        self.double()
        if scenario.frozen:
            (self.trunk if scenario.frozen == "trunk" else self.heads[1]).requires_grad_(False)

    def forward(self, x: Tensor, head: int = 0, hidden_too: bool = False) -> Any:
        hidden = self.fault(self.trunk(x))
        return (self.heads[head](hidden), hidden) if hidden_too else self.heads[head](hidden)


def rows_of(micro_batch: MicroBatch, seed: int) -> tuple[Tensor, Tensor]:
    """Its rows, which the seed tells; the second half of them in another range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(micro_batch.rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (micro_batch.rows,), generator=generator)


def loss_of(scenario: Scenario, model: Any, x: Tensor, y: Tensor, head: int = 0, part: int = 0) -> Tensor:
    """The loss over these rows, a mean or a sum over what `scenario.loss` says."""
    if part == 1:
        return model(x, head).square().sum(1).mean() * 0.1
    logits = model(x, head)
    if scenario.loss == "sum":
        return nn.functional.cross_entropy(logits, y, reduction="sum") * 0.1
    if scenario.loss == "ignored":
        return nn.functional.cross_entropy(logits, y, ignore_index=0)
    if scenario.loss == "classes":
        return nn.functional.cross_entropy(logits, y, weight=CLASS_WEIGHTS)
    return nn.functional.cross_entropy(logits, y)


def update(scenario: Scenario, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], Any]) -> None:
    """One ordinary step: the oracle's."""
    optimizer.zero_grad()
    backward()
    if scenario.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
    if scenario.hook:
        halve(optimizer)
    optimizer.step()


def halve(optimizer: Any, *_: Any) -> None:
    """A user's hook on the finished gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def loader_of(scenario: Scenario, batches: list[tuple[Any, ...]]) -> Iterable[Any]:
    """The batches as a loader of this kind hands them out."""
    if scenario.loader == "generator":
        return (batch for batch in batches)
    if scenario.loader in ("refilled", "dict refilled"):
        return _refilled(batches)
    if scenario.loader == "DataLoader":
        return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    return batches


def _refilled(batches: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """One buffer, refilled in place."""
    most = max(len(batch[0]) for batch in batches)
    x, y = torch.empty(most, 5, dtype=torch.float64), torch.empty(most, dtype=torch.long)
    for own_x, own_y, *rest in batches:
        x[: len(own_x)] = own_x
        y[: len(own_y)] = own_y
        yield (x[: len(own_x)], y[: len(own_y)], *rest)
