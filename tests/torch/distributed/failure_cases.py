"""What goes wrong on one rank, or on all of them, in the tests of windows over several ranks."""

import os
import pathlib
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradaccum.errors import WindowError
from gradaccum.torch import Blocks, TrainStep
from gradaccum.torch.optim import Optimizer
from tests.torch.distributed.ddp_cases import Heads, by_name, train
from tests.torch.distributed.problems import (
    OPTIMIZERS,
    built,
    data,
    lines_of,
    loss_of,
    network,
    shard,
    spread,
    wrap,
    wrap_over,
)


def step_all(replica: Any, optimizer: Optimizer, loader: Any) -> None:
    for rows in loader:
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](model.parameters())


def wrapped(model: nn.Module, inner: Any = None, steps: int = 2, **keywords: Any) -> Optimizer:
    return Optimizer(sgd(model) if inner is None else inner, steps=steps, model=model, **keywords)


def local_sgd(model: Any) -> Any:
    state = post_localSGD_hook.PostLocalSGDState(None, None, 100)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return model


def post_local(inner: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script
        from torch.distributed.optim import PostLocalSGDOptimizer
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=0))


def later(shards: bool) -> None:
    """The model is wrapped when the optimizer is there, or when its inner one is."""
    model, rows = network(), data([[4] * 4] * 2)[dist.get_rank()]
    if shards:
        inner = sgd(model)
        wrapped(shard(model), inner)
    else:
        optimizer = wrapped(model)
        step_all(ddp(model), optimizer, rows)


def with_extra(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"]([*model.parameters(), *nn.Linear(2, 2).parameters()])


def joined() -> None:
    replica, optimizer = wrap(network(), 2)
    with replica.join():
        step_all(replica, optimizer, data([[4] * 4, [4] * 2])[dist.get_rank()])


def first_layer_sharded() -> nn.Module:
    model = network()
    fully_shard(model[0])  # type: ignore[index]
    return model


def ddp(model: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(network() if model is None else model)


def lbfgs(model: nn.Module, by_step: bool) -> None:
    inner = torch.optim.LBFGS(model.parameters())
    if by_step:
        TrainStep(model, inner, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)
    else:
        wrapped(model, inner, 1)


MADE: dict[str, Any] = {
    "wrapped twice": lambda: wrapped(replica := ddp(), wrapped(replica)),
    "wrapped later": lambda: later(False),
    "sharded later": lambda: later(True),
    "parameters outside": lambda: wrapped(replica := ddp(), with_extra(replica)),
    "parameters not sharded": lambda: wrapped(first_layer_sharded()),
    "LBFGS": lambda: lbfgs(ddp(), False),
    "LBFGS, TrainStep": lambda: lbfgs(ddp(), True),
    "LBFGS, shards": lambda: lbfgs(shard(network()), False),
    "LBFGS, shards, TrainStep": lambda: lbfgs(shard(network()), True),
    "local SGD by a hook": lambda: wrapped(local_sgd(ddp())),
    "local SGD by an optimizer": lambda: wrapped(replica := ddp(), post_local(sgd(replica))),
    "a sparse table": lambda: wrap(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 3)), 2),
    "join()": joined,
}


def made(rank: int, what: str) -> None:
    MADE[what]()


def static_graph(rank: int) -> list[str]:
    return lines_of(lambda: wrap(network(), 2, {"static_graph": True}))


def unknown(rank: int, engine: str, steps: int) -> list[str]:
    """A data-parallel model, and no model=: a line says what that means, or an error where it cannot work."""

    def run() -> None:
        used = spread(engine, network(), {})
        step_all(used, Optimizer(sgd(used), steps=steps), data([[4] * 4] * 2)[rank])

    return lines_of(run)


def step_of(model: nn.Module, **keywords: Any) -> TrainStep:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(m(x), y, reduction=keywords.get("reduction", "mean"))

    return TrainStep(model, sgd(model), compute_loss=loss, **{"micro_batch_size": 4, **keywords})


def different_options(rank: int, engine: str, option: str, values: Any) -> None:
    """Each rank has its own value of an option."""
    (wrapped if engine == "ddp" else step_of)(ddp(), **{option: values[rank]})


def different_parts(rank: int, way: str, sync: str) -> None:
    heads, engine = [[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]], "fsdp2 nested"
    train(rank, [[4] * 6] * 2, 2, way, engine=engine, build=Heads, heads=heads, sync=sync)


def different_steps(rank: int, schedule: bool) -> None:
    steps = (lambda epoch, update: 2 + 2 * rank) if schedule else 2 + 2 * rank
    replica, optimizer = wrap(network(), steps)
    step_all(replica, optimizer, data([[4] * 4] * 2)[rank])


KEPT = list[Optimizer]()


def fails(rank: int, engine: str, way: str, what: str, at: int = 2, given_up: pathlib.Path | None = None) -> None:
    """Something happens on rank 1 in a micro-batch, inside a window; errors are handled, and the process lives on."""
    model, optimizer = wrap(network(), 4) if engine == "ddp" else built(steps=4)

    def failure(*_: Any) -> None:
        raise ArithmeticError("rank 1 failed")

    def loader() -> Any:
        for i, (x, y) in enumerate(data([[4] * 8] * 2)[rank][: at if what == "fewer" and rank == 1 else None]):
            here = (rank, i) == (1, at)
            if here and what == "loader":
                failure()
            yield (x, y[:1]) if here and what == "rows" else (x, y)

    for i, rows in enumerate(optimizer.batches(loader()) if way == "batches" else loader()):
        here = what if (rank, i) == (1, at) else ""
        if here == "break":
            break
        if here == "dies":
            os._exit(1)
        while (
            here == "is late" and given_up is not None and not given_up.exists()
        ):  # comes when nobody waits any longer
            time.sleep(0.01)
        optimizer.zero_grad()
        if here == "forward":
            failure()
        if here == "closure":
            KEPT.append(optimizer)  # which would say it, too, if it went
            optimizer.step(failure)
        loss = loss_of(model, rows)
        if here == "backward":
            loss.register_hook(failure)
        try:
            optimizer.backward(loss, weight=4)
            optimizer.step()
        finally:
            if rank == 0 and optimizer.updates == 0 and i == 3 and given_up is not None:
                given_up.touch()
    if what == "fewer":
        optimizer.flush()


def step_fails(rank: int, what: str) -> None:
    """TrainStep fails on rank 1: its labels are too few, or it has no memory, or no rows for a loss that needs some."""

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if rank == 1 and what == "memory":
            raise torch.OutOfMemoryError("no memory")
        return nn.functional.cross_entropy(m(x).view(len(x), -1) if what == "no rows" else m(x), y)

    model = ddp() if what == "labels" else shard(network())
    step = TrainStep(model, sgd(model), compute_loss=loss, micro_batch_size=4)
    x, y = data([[8], [0 if what == "no rows" else 8]])[rank][0]
    step(x, y[: 8 - rank] if what == "labels" else y)


def edited(rank: int, engine: str, steps: int) -> None:
    """Clipping what an open window has added up, on every micro-batch, as a plain loop does."""
    model, optimizer = wrap_over(engine, network(), steps)
    for rows in data([[4, 2, 5, 3]] * 2)[rank]:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def named_later(rank: int) -> None:
    """Losses by name come in a later window than the first."""
    model, optimizer = wrap(network(), 1)
    for i, rows in enumerate(data([[4] * 3] * 2)[rank]):
        optimizer.zero_grad()
        losses = by_name(model, rows)
        optimizer.backward(losses) if i else optimizer.backward(*losses["rows"])
        optimizer.step()


def another_rank(rank: int) -> None:
    """Every rank loads what rank 0 saved inside a window."""
    replica, optimizer = wrap(network(), 4)
    step_all(replica, optimizer, data([[4] * 2] * 2)[rank])
    state = optimizer.state_dict()
    state["gradaccum"]["rank"] = [0, 2]
    optimizer.discard()
    optimizer.load_state_dict(state)


def weighed_on_one_rank(rank: int) -> None:
    """Rank 0 weighs its micro-batches, rank 1 does not."""
    replica, optimizer = wrap(network(), 2)
    for rows in data([[4] * 4] * 2)[rank]:
        optimizer.zero_grad()
        if rank == 0:
            optimizer.backward(loss_of(replica, rows), weight=4)
        else:
            loss_of(replica, rows).backward()
        optimizer.step()


def cannot_be_built(rank: int, which: str) -> None:
    """Rank 1's Optimizer or TrainStep is refused, which rank 0 hears of; it is then built again on both ranks."""
    replica = DistributedDataParallel(network())
    with pytest.raises(WindowError if rank == 0 else ValueError) as raised:
        if which == "optimizer":
            Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2 - 2 * rank, model=replica)
        else:
            step_of(replica, micro_batch_size=4 - 4 * rank)
    assert rank == 1 or "Rank 1 raised an error while it built" in str(raised.value)
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2, model=replica)
    step_all(replica, optimizer, data([[4] * 2] * 2)[rank])


def never_built(rank: int) -> None:
    """Rank 1 builds no Optimizer."""
    replica = DistributedDataParallel(network())
    if rank == 0:
        Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2, model=replica)
    raise ArithmeticError("rank 1 failed")


def two_on_one_sharded_model(rank: int) -> None:
    """The first one's turn comes again when the other is gone."""
    sharded = shard(network())
    first, second = ([*part.parameters()] for part in (sharded[0], sharded[2]))  # type: ignore[index]
    Optimizer(OPTIMIZERS["sgd"](second), steps=2, model=sharded)
    optimizer = Optimizer(OPTIMIZERS["sgd"](first), steps=2, model=sharded)
    with pytest.raises(ValueError, match="Another wrapped optimizer has other parameters of this sharded model"):
        Optimizer(OPTIMIZERS["sgd"](second), steps=2, model=sharded)
    step_all(sharded, optimizer, data([[4] * 2] * 2)[rank])
    assert optimizer.updates == 1


def schedule_stepped_in_the_body(rank: int) -> None:
    """Rank 1's loop is over when two updates are to come, and an average's hook hides the line that says it."""
    model, optimizer = wrap(network(), 1)
    optimizer.register_step_post_hook(lambda *_: None)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for rows in optimizer.batches(data([[4] * 3, [4] * 1])[rank]):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        if optimizer.updated:
            schedule.step()


def different_hyperparameters(rank: int, name: str, values: Any, way: str) -> None:
    """Ranks give a hyperparameter values of their own."""
    model = network()
    groups = [{"params": [p]} for p in model.parameters()]
    inner = torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False)
    inner.param_groups[2][name] = values[rank]
    if way.startswith("layers"):
        sharded = shard(model)
        inner = torch.optim.AdamW([{"params": [p]} for p in sharded.parameters()])
        inner.param_groups[2][name] = values[rank]
        update: Any = "in_backward" if "in_backward" in way else "after_backward"
        step = TrainStep(
            sharded,
            inner,
            loss_fn=nn.CrossEntropyLoss(),
            micro_batch_size=2,
            blocks=Blocks([sharded[0]], update=update),
        )
        step(*data([[4]] * 2)[rank][0])
    elif way == "step":
        replica = DistributedDataParallel(model)
        TrainStep(replica, inner, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)(*data([[4]] * 2)[rank][0])
    else:
        replica = DistributedDataParallel(model)
        step_all(replica, Optimizer(inner, steps=2, model=replica), data([[4] * 2] * 2)[rank])
