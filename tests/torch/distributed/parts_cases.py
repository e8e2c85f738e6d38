"""What each rank does in the tests of models whose ranks use different parts of it, and of unusual ways to run DDP."""

import copy
import gc
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import relative_error
from tests.torch.distributed.problems import OPTIMIZERS, Oracle, data, loss_of, network, shard, train_on, whole, wrap

TWO_DTYPES = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)


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
    elif engine == "fsdp2 in two dtypes":
        fully_shard(model, mp_policy=TWO_DTYPES)
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


def through_grad(rank: int, penalty: bool) -> float:
    """torch.autograd.grad through DDP in each micro-batch: a gradient penalty, or a look at what the input matters."""
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2)
    ranks = data([[4, 3, 2, 5], [2, 5, 4, 1]])

    def loss(m: nn.Module, rows: Any) -> Tensor:
        x = rows[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=penalty)
        return loss_of(m, rows) + (gradient.square().sum(1).mean() if penalty else 0.0)

    oracle.see(ranks, 2, loss)
    train_on(replica, optimizer, ranks[rank], weighed=True, loss=loss)
    return oracle.error(model)


class Checkpointed(nn.Module):
    """A layer, or all of them, run again in the backward pass."""

    def __init__(self, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.layers, self.reentrant, self.whole = network(), reentrant, whole

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return checkpoint(self.layers, x.requires_grad_(), use_reentrant=self.reentrant)
        hidden = torch.tanh(self.layers[0](x))  # type: ignore[index]
        return checkpoint(self.layers[2], hidden, use_reentrant=self.reentrant)  # type: ignore[index]


def checkpointed(rank: int, reentrant: bool, whole: bool, static: bool) -> float:
    model = Checkpointed(reentrant, whole)
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2, {"static_graph": static})
    ranks = data([[4, 3, 2, 5, 4], [2, 5, 4]])
    oracle.see(ranks, 2)
    train_on(replica, optimizer, optimizer.batches(ranks[rank]))
    return oracle.error(model)


def joined(rank: int) -> None:
    replica, optimizer = wrap(network(), 2)
    with replica.join():
        train_on(replica, optimizer, data([[4] * 4, [4] * 2])[rank])


def local_sgd(rank: int, hook: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script
        from torch.distributed.optim import PostLocalSGDOptimizer
    model = network()
    replica = DistributedDataParallel(model)
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if hook:
        state = post_localSGD_hook.PostLocalSGDState(None, None, 100)
        replica.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    else:
        inner = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=0))
    Optimizer(inner, steps=2, model=replica)


def not_sharded(rank: int) -> None:
    """A part of the model that nobody sharded."""
    model = network()
    fully_shard(model[0])  # type: ignore[index]
    Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=2, model=model)


def unused_in_train_step(rank: int, engine: str) -> float:
    """A head without a turn, and one that rank 1 alone uses: none of DDP's flags says so."""
    model = Heads()
    oracle = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](oracle.parameters())
    used: Any = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    ranks = data([[4, 6, 5], [3, 5, 2]])

    def loss(m: Any, x: Tensor, y: Tensor, head: int = 0) -> Tensor:
        return nn.functional.cross_entropy(m(x, head), y)

    step = TrainStep(
        used,
        OPTIMIZERS["adamw"](model.parameters()),
        compute_loss=lambda m, x, y: loss(m, x, y, rank),
        micro_batch_size=2,
        verify=False,
    )
    for batches in zip(*ranks):
        total = sum(len(x) for x, _ in batches)
        plain.zero_grad()
        sum(loss(oracle, *rows, r) * (len(rows[0]) / total) for r, rows in enumerate(batches)).backward()  # type: ignore[union-attr]
        plain.step()
        step(*batches[rank])
    return relative_error(whole(model), list(oracle.parameters()))


def hooks_left(rank: int, engine: str) -> tuple[int, bool]:
    """Wrap a model again and again. Returns (hooks more than before, whether a plain loop reduces again)."""
    model = network()
    used: Any = DistributedDataParallel(model) if engine == "ddp" else shard(model)
    before = hooks_of(used)
    for _ in range(3):
        optimizer = Optimizer(OPTIMIZERS["sgd"](used.parameters()), steps=2, model=used)
        train_on(used, optimizer, data([[4] * 2] * 2)[rank])
    del optimizer
    gc.collect()
    loss_of(used, data([[4]] * 2)[rank][0]).backward()
    gradient = whole_gradient(model)
    others = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(others, gradient)
    return hooks_of(used) - before, torch.equal(*others)


def hooks_of(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def whole_gradient(model: nn.Module) -> Tensor:
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).reshape(-1) for g in gradients])
