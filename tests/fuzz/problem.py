"""What the fuzzer trains: small models, their batches and losses, and what goes wrong in them."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import chunked
from tests.fuzz.scenario import MicroBatch, Scenario
from tests.reference import relative_error
from tests.torch.problems import Does

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}

SCHEDULES: dict[str, Callable[[Any], torch.optim.lr_scheduler.LRScheduler]] = {
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=1000, cycle_momentum=bool({"momentum", "betas"} & {*optimizer.defaults})
    ),
}

CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
COLUMNS = 6
"""Of padded rows of tokens."""


class Injected(Exception):
    """An error in the middle of a pass."""


class Gone(Exception):
    """An error that ends a rank's loop."""


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
        self.calm()

    def calm(self, memory: int = 0) -> None:
        """Nothing goes wrong, unless more rows come than fit."""
        self.where, most = "", memory or 10**9
        self.most = {"forward": most, "backward": most}

    def prepare(self, event: str, most: int) -> None:
        """What shall go wrong next."""
        if event in ("forward error", "backward error"):
            self.where = event.removesuffix(" error")
        if event == "oom":
            self.most["forward"] = min(most, self.most["forward"])
        if event == "backward oom":
            self.most["backward"] = min(most, self.most["backward"])

    def forward(self, x: Tensor) -> Tensor:
        self.strike("forward", len(x))
        return _Fault.apply(x, self)

    def strike(self, here: str, rows: int) -> None:
        if self.where == here:
            self.where = ""
            raise Injected
        if rows > self.most[here]:
            raise torch.OutOfMemoryError("no memory")


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # a reentrant checkpoint needs one
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def _by_chunk(model: Does, x: Tensor) -> Tensor:
    return torch.cat([model.module(rows) for rows in x.split(split_sizes(len(x), model.size))])


def _of_tokens(model: Does, batch: dict[str, Tensor]) -> Tensor:
    """Each token's outputs look at the ones before it that aren't padding."""
    mask = batch["attention_mask"].to(model.embedding.weight.dtype)[..., None]
    seen = (model.embedding(batch["input_ids"]) * mask).cumsum(1)
    return torch.tanh(seen / mask.cumsum(1).clamp(min=1.0))


class _Layer(nn.Module):
    """A block with an argument that is no tensor, and a second output that nobody uses."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(6, 6), nn.Dropout(0.4 if dropout else 0.0)

    def forward(self, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.inner(x))
        return x + (1 + head) * self.dropout(y), y


class Model(nn.Module):
    """A trunk, maybe blocks, heads that the batch chooses, and a layer that is never used."""

    def __init__(self, scenario: Scenario, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(scenario.seed % 1000)
        trunk: nn.Module = self._trunk(scenario)
        if scenario.norm == "frozen" and alone:
            trunk[1].train = lambda mode=True: trunk[1]
            trunk[1].training = False
        if scenario.checkpoint:
            trunk = Checkpointed(trunk, scenario.checkpoint == "reentrant")
        if scenario.chunk and not scenario.norm:
            trunk = Does(_by_chunk, module=trunk, size=scenario.chunk) if alone else chunked(trunk, scenario.chunk)
        self.trunk = trunk
        self.layers = nn.ModuleList(_Layer(scenario.dropout) for _ in range(3 if scenario.blocks else 0))
        if scenario.blocks and scenario.unused:
            self.layers[2].inner.weight = self.layers[0].inner.weight
        self.fault = Faulty()
        self.fault.calm(0 if alone else scenario.memory)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(1 if scenario.engine == "ddp" else 2))
        if scenario.unused:
            self.never = nn.Linear(2, 2)
        self.to(torch.float64 if scenario.dtype == "float64" else torch.float32)
        if scenario.frozen:
            (self.trunk if scenario.frozen == "trunk" else self.heads[-1]).requires_grad_(False)
        if scenario.hook in ("parameter", "clamp"):
            half = scenario.hook == "parameter"
            for parameter in filter(lambda p: p.requires_grad, self.parameters()):
                parameter.register_hook(lambda g: g * 0.5 if half else g.clamp(-0.02, 0.02))
        if scenario.hook == "module":
            self.heads[0].register_forward_hook(lambda module, inputs, outputs: outputs * 2)
            self.heads[0].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] / 4,))

    @staticmethod
    def _trunk(scenario: Scenario) -> nn.Module:
        if scenario.loss == "tokens":
            return Does(_of_tokens, embedding=nn.Embedding(11, 6))
        layers: list[nn.Module] = [nn.Linear(5, 6, bias=not scenario.norm), nn.Tanh()]
        if scenario.norm:
            layers.insert(1, nn.BatchNorm1d(6))
        if scenario.dropout:
            layers.append(nn.Dropout(0.4))
        return nn.Sequential(*layers)

    def forward(self, x: Any, head: int = 0) -> Any:
        x = self.fault(self.trunk(x))
        for layer in self.layers:
            x, _ = layer(x, head)
        return self.heads[head](x)


def limit(optimizer: Any, *_: Any) -> None:
    """A user's hook on the finished gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if parameters:
        nn.utils.clip_grad_value_(parameters, 0.02)


class Script:
    """A model, over all ranks or `alone`, its plain optimizers and their schedules."""

    def __init__(self, scenario: Scenario, alone: bool = True) -> None:
        self.scenario, self.model = scenario, Model(scenario, alone)
        self.used = self.model if alone else several(scenario, self.model)
        self.parts = [list(self.model.parameters())]
        if scenario.optimizers > 1:
            trunk = {*self.model.trunk.parameters()}
            self.parts = [[p for p in self.parts[0] if (p in trunk) == first] for first in (True, False)]
        self.plain = [OPTIMIZERS[scenario.optimizer](part) for part in self.parts]
        self.schedules = schedules_of(scenario, self.plain)


def several(scenario: Scenario, model: Any) -> Any:
    """The model over all ranks."""
    if not scenario.engine:
        return model
    if scenario.engine.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters="unused" in scenario.engine)
    from torch.distributed.fsdp import fully_shard

    for part in (model.trunk, model.heads[0]) if scenario.engine.startswith("nested") else ():
        fully_shard(part)
    return fully_shard(model)


def schedules_of(scenario: Scenario, optimizers: list[Any]) -> list[Any]:
    return [SCHEDULES[scenario.schedule](optimizer) for optimizer in optimizers if scenario.schedule]


def scaler_of(scenario: Scenario) -> Any:
    interval = max(1, scenario.scaler)
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=interval, enabled=scenario.scaler != 0)


def autocast(scenario: Scenario) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if scenario.dtype == "autocast" else contextlib.nullcontext()


def freeze(model: Model) -> None:
    """Switch whether the trunk is trained."""
    for parameter in model.trunk.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


# What there is of it, to compare or to save.


def whole(tensors: Any) -> list[Tensor]:
    """Tensors, of which each rank may hold a part."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.double() for buffer in model.buffers()]


def state_of(optimizer: Any) -> list[Tensor | None]:
    names = ("momentum_buffer", "exp_avg", "exp_avg_sq", "ax")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state.get(p, {}).get(name) for p in parameters for name in names]


def apart(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The relative error; infinite where one is None and the other is not."""
    if [g is None for g in actual] != [g is None for g in expected]:
        return float("inf")
    return relative_error([g for g in actual if g is not None], [g for g in expected if g is not None])


def saved(states: Any) -> Any:
    """What a file makes of them."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def states_of(scenario: Scenario, parts: list[Any]) -> Any:
    """What a new run goes on from: of several ranks, copies."""
    return (copy.deepcopy if scenario.engine else saved)([part.state_dict() for part in parts])


# Batches and losses.


def split_sizes(rows: int, most: int) -> list[int]:
    """Rows of micro-batches of at most `most`, as even as can be."""
    count = math.ceil(rows / most) if most else 1
    return [rows // count + (i < rows % count) for i in range(count)]


def rows_of(scenario: Scenario, micro_batch: MicroBatch, seed: int) -> tuple[Any, Tensor]:
    """Its rows, which the seed tells."""
    generator = torch.Generator().manual_seed(seed)
    rows = micro_batch.rows
    if scenario.loss == "tokens":
        lengths = torch.randint(1, COLUMNS + 1, (rows, 1), generator=generator)
        mask = (torch.arange(COLUMNS) < lengths).long()
        mask = mask.flip(1) if seed % 3 == 0 else mask
        ids = torch.randint(0, 11, (rows, COLUMNS), generator=generator)
        labels = torch.randint(0, 3, (rows, COLUMNS), generator=generator)
        drop = torch.rand(rows, COLUMNS, generator=generator) < 0.2
        return {"input_ids": ids, "attention_mask": mask}, labels.masked_fill((mask == 0) | drop, -100)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    if scenario.dtype != "float64":
        x = x.float()
    return x, torch.randint(0, 3, (rows,), generator=generator)


def loss_of(scenario: Scenario, model: Any, x: Any, y: Tensor, head: int = 0, part: int = 0) -> Tensor:
    """The loss over these rows, a mean or a sum over what `scenario.loss` says."""
    if part == 1:
        return model(x, head).square().sum(1).mean() * 0.1
    if scenario.loss == "penalty":
        x = x.detach().requires_grad_()
    logits = model(x, head)
    kind = scenario.loss
    if kind == "sum":
        return nn.functional.cross_entropy(logits, y, reduction="sum") * 0.1
    if kind == "tokens":
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    if kind in ("ignored", "told", "weighed sum"):
        return nn.functional.cross_entropy(logits, y, ignore_index=0)
    loss = nn.functional.cross_entropy(logits, y, weight=CLASS_WEIGHTS.to(x.dtype) if kind == "classes" else None)
    if kind == "terms":
        return loss + logits.square().sum(1).mean() * 0.1
    if kind == "penalty":
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return loss + slope.square().sum(1).mean()
    if kind == "across":
        return loss + logits.var(0, correction=0).sum()
    return loss


def ids_of(scenario: Scenario, rows: int) -> Tensor:
    """Which rows belong together."""
    return torch.arange(rows) // 2 if scenario.loss == "pairs" else torch.arange(rows) % (rows // 2)


def in_groups(logits: Tensor, ids: Tensor) -> Tensor:
    """A mean over rows of what looks at the rows of their groups."""
    together = (ids[:, None] == ids).to(logits.dtype)
    return (logits - together @ logits / together.sum(1, keepdim=True) / 2).square().sum(1).mean()


def named_losses(scenario: Scenario, model: Any, x: Any, y: Tensor, head: int) -> dict[Any, tuple[Tensor, Any]]:
    """Losses with what each is a mean over: perhaps nothing, where some scenarios leave it out. One is a metric."""
    logits = model(x, head)
    found: dict[Any, tuple[Tensor, Any]] = {
        name: (nn.functional.cross_entropy(logits * (1 + name), y, ignore_index=name), (y != name).sum())
        for name in (0, 1)
    }
    found[2], found[3] = (logits.square().mean(), len(y)), (logits.detach().square().mean(), float(len(y)))
    return {name: term for name, term in found.items() if is_there(scenario, name, term[1])}


def is_there(scenario: Scenario, name: int, weight: Any) -> bool:
    """Some leave out what weighs nothing; others have but one loss that trains, which some rows lack."""
    return bool(weight) if scenario.seed % 5 == 0 else name in (0, 3) if scenario.seed % 5 == 1 else True


def weight_of(scenario: Scenario, y: Tensor) -> float:
    """What the loss over these rows is a mean over."""
    if scenario.loss in ("ignored", "told", "weighed sum"):
        return float((y != 0).sum())
    if scenario.loss == "tokens":
        return float((y != -100).sum())
    if scenario.loss == "classes":
        return float(CLASS_WEIGHTS[y].sum())
    return float(len(y))
