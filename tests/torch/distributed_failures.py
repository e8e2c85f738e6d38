"""What goes wrong on one rank, or on all of them, in the tests of windows over several ranks."""

import logging
import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.torch.distributed_cases import OPTIMIZERS, data, loss_of, network, wrap


def step_all(replica: Any, optimizer: Optimizer, loader: Any) -> None:
    for rows in loader:
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        optimizer.step()


def wrapped_later(rank: int) -> None:
    model = network()
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=2, model=model)
    step_all(DistributedDataParallel(model), optimizer, data([[4] * 4] * 2)[rank])


def unknown(rank: int, steps: int) -> list[str]:
    """DDP, and no model=: a line says what that means, or an error where it cannot work."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradaccum").addHandler(handler)
    try:
        model = network()
        replica = DistributedDataParallel(model)
        step_all(replica, Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=steps), data([[4] * 4] * 2)[rank])
    finally:
        logging.getLogger("gradaccum").removeHandler(handler)
    return lines


def different_steps(rank: int, schedule: bool) -> None:
    steps = (lambda epoch, update: 2 + 2 * rank) if schedule else 2 + 2 * rank
    replica, optimizer = wrap(network(), steps)
    step_all(replica, optimizer, data([[4] * 4] * 2)[rank])


def wrapped_twice(rank: int) -> None:
    replica, optimizer = wrap(network(), 2)
    Optimizer(optimizer, steps=2, model=replica)


def parameters_outside(rank: int) -> None:
    model, extra = network(), nn.Linear(2, 2)
    Optimizer(
        OPTIMIZERS["sgd"]([*model.parameters(), *extra.parameters()]), steps=2, model=DistributedDataParallel(model)
    )


def raises(rank: int, where: str, way: str) -> None:
    """Rank 1 raises in its third micro-batch, inside a window; the error is handled, and the process lives on."""
    replica, optimizer = wrap(network(), 4)
    loader = data([[4] * 8] * 2)[rank]
    for i, rows in enumerate(optimizer.batches(loader) if way == "batches" else loader):
        optimizer.zero_grad()
        if rank == 1 and i == 2 and where == "forward":
            raise ArithmeticError("rank 1 failed")
        loss = loss_of(replica, rows)
        if rank == 1 and i == 2 and where == "backward":
            loss.register_hook(_fails)
        optimizer.backward(loss, weight=4)
        optimizer.step()


def _fails(gradient: torch.Tensor) -> None:
    raise ArithmeticError("rank 1 failed")


def breaks(rank: int) -> None:
    """One rank alone leaves its loop."""
    replica, optimizer = wrap(network(), 4)
    for i, rows in enumerate(optimizer.batches(data([[4] * 8] * 2)[rank])):
        if rank == 1 and i == 2:
            break
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        optimizer.step()


def dies(rank: int) -> None:
    """One rank's process ends in the middle of a window."""
    replica, optimizer = wrap(network(), 4)
    for i, rows in enumerate(data([[4] * 8] * 2)[rank]):
        if rank == 1 and i == 2:
            os._exit(1)
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        optimizer.step()


def sleeps(rank: int, seconds: float) -> None:
    """One rank is late for longer than the process group waits."""
    replica, optimizer = wrap(network(), 2)
    for i, rows in enumerate(data([[4] * 2] * 2)[rank]):
        if rank == 1 and i == 1:
            time.sleep(seconds)
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        optimizer.step()


def another_rank(rank: int) -> None:
    """Every rank loads what rank 0 saved inside a window."""
    replica, optimizer = wrap(network(), 4)
    step_all(replica, optimizer, data([[4] * 2] * 2)[rank])
    state = optimizer.state_dict()
    state["gradaccum"]["rank"] = [0, 2]
    optimizer.discard()
    optimizer.load_state_dict(state)


def train_step_raises(rank: int) -> None:
    model = network()
    replica = DistributedDataParallel(model)
    step = TrainStep(replica, OPTIMIZERS["sgd"](model.parameters()), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)
    x, y = data([[4]] * 2)[rank][0]
    step(x, y)
    step(x, y[: 4 - rank])
