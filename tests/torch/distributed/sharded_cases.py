"""What each rank does in the tests of windows of sharded models (FSDP2)."""

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import (
    OPTIMIZERS,
    Collectives,
    Oracle,
    built,
    concatenated,
    data,
    loss_of,
    network,
    shard,
    train_on,
    whole,
)


def mixed_precision(rank: int) -> tuple[float, str]:
    """bfloat16 passes, sums and reductions in float32: as close as the gradients' own rounding."""
    model = network(torch.float32)
    reference = copy.deepcopy(model).bfloat16()
    ranks = data([[4] * 8] * 2, dtype=torch.float32)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
    for own in ranks:
        for x, y in own:
            loss = nn.functional.cross_entropy(reference(x.bfloat16()), y)
            for total, gradient in zip(sums, torch.autograd.grad(loss, list(reference.parameters())), strict=True):
                total += gradient.double() / 16
    sharded = shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = Optimizer(torch.optim.SGD(sharded.parameters(), lr=0.1), steps=8, model=sharded)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.full_tensor() for p in sharded.parameters()))
    train_on(sharded, optimizer, optimizer.batches(ranks[rank]))
    return relative_error(seen, sums), str(seen[0].dtype)


def kept_gathered(rank: int, sync: str) -> dict[str, int]:
    """All-gathers of one window of four micro-batches."""
    sharded = shard(network(), reshard_after_forward=False)
    optimizer = Optimizer(OPTIMIZERS["sgd"](sharded.parameters()), steps=4, model=sharded, sync=sync)
    ranks = data([[4] * 8] * 2)
    for i, rows in enumerate(ranks[rank]):
        if i == 4:
            collectives = Collectives().__enter__()
        optimizer.zero_grad()
        optimizer.backward(loss_of(sharded, rows))
        optimizer.step()
    collectives.__exit__()
    return collectives.counts


def scaler_and_flush(rank: int, sync: str) -> tuple[float, int]:
    """A window that is flushed, whose sum no GradScaler has looked at: an overflow in it makes no update."""
    model = network()
    oracle = Oracle(model)
    sharded, optimizer = built(sync, model=model)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ranks = data([[4, 3, 2, 5], [2, 2, 5, 1]])
    oracle.update(concatenated([own[i] for own in ranks for i in (2, 3)]))
    for i, rows in enumerate(ranks[rank]):
        optimizer.zero_grad()
        loss = loss_of(sharded, rows) * (float("inf") if (rank, i) == (1, 0) else 1.0)
        optimizer.backward(grad_scaler.scale(loss), weight=len(rows[0]))
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if i % 2:
            assert optimizer.flush() == (i == 3)
    return oracle.error(sharded), optimizer.updates


def saved_with_scaler(rank: int) -> float:
    """A window under a GradScaler, saved and loaded: its sum is saved unscaled."""
    ranks = data(UNFINISHED)
    model = network()
    oracle = Oracle(model)
    oracle.see(ranks, 3)

    def train(model: nn.Module, optimizer: Optimizer, scale: float, batches: Any) -> None:
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for rows in batches:
            optimizer.zero_grad()
            optimizer.backward(grad_scaler.scale(loss_of(model, rows)), weight=len(rows[0]))
            grad_scaler.step(optimizer)
            grad_scaler.update()

    sharded, optimizer = built(model=model)
    train(sharded, optimizer, 1024.0, ranks[rank][:2])
    state = copy.deepcopy(optimizer.state_dict())
    again, other = built()
    other.load_state_dict(state)
    train(again, other, 256.0, ranks[rank][2:])
    return oracle.error(again)


def discarded(rank: int) -> float:
    """What an open window has added up inside FSDP goes with the window."""
    model = network()
    oracle = Oracle(model)
    sharded = shard(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](sharded.parameters()), steps=2, model=sharded)
    ranks = data([[4] * 3] * 2)
    oracle.update(concatenated([own[i] for own in ranks for i in (1, 2)]))
    for i, rows in enumerate(ranks[rank]):
        optimizer.zero_grad()
        optimizer.backward(loss_of(sharded, rows))
        optimizer.step()
        if i == 0:
            optimizer.discard()
    return oracle.error(sharded)


def uneven(rank: int, way: str, sync: str) -> None:
    """Rank 1 has fewer batches in its second epoch, which end within a window or between two."""
    sharded, optimizer = built(sync, steps=2)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if way == "scaler" else None
    for sizes in ([[4] * 3] * 2, [[4] * 5, [4] * (4 if way == "between" else 3)]):
        for rows in optimizer.batches(data(sizes)[rank]):
            optimizer.zero_grad()
            loss = loss_of(sharded, rows)
            if grad_scaler is not None:
                grad_scaler.scale(loss).backward()
                grad_scaler.step(optimizer)
                grad_scaler.update()
            else:
                optimizer.backward(loss, weight=3.0)
                optimizer.step()


def train_step_goes_on(rank: int) -> float:
    """After an error on all ranks nothing of the batch is left."""
    model = network()
    oracle = Oracle(model)
    sharded = shard(model)
    fails = [False, True, False]  # a loss that fails in its second micro-batch

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if fails and fails.pop(0):
            raise ArithmeticError
        return nn.functional.cross_entropy(m(x), y)

    step = TrainStep(sharded, OPTIMIZERS["sgd"](sharded.parameters()), compute_loss=loss, micro_batch_size=2)
    ranks = data([[4, 4], [4, 4]])
    with contextlib.suppress(ArithmeticError):
        step(*ranks[rank][0])
    fails.clear()
    oracle.update(concatenated([own[1] for own in ranks]))
    step(*ranks[rank][1])
    return oracle.error(sharded)


UNFINISHED = [[4, 3, 5, 1, 2, 6], [2, 5, 1, 4, 3, 2]]
"""Rows of two ranks: a window of three micro-batches, and another one."""


def numbers(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in whole(model)]


def saved_inside(
    rank: int, folder: str, first: int, sync: str, optimizer: str, way: str = "get_state_dict", flat: bool = False
) -> list[Any]:
    """Save after so many micro-batches with torch.distributed.checkpoint, and train on. Returns the parameters."""
    sharded, wrapped = built(sync, optimizer)
    batches = data(UNFINISHED * (dist.get_world_size() // 2))[rank]
    train_on(sharded, wrapped, batches[:first], weighed=True)
    if way == "get_state_dict":
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optimizer_state = get_state_dict(sharded, wrapped, options=options)
    else:
        model_state, optimizer_state = sharded.state_dict(), wrapped.state_dict()
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train_on(sharded, wrapped, batches[first:], weighed=True)
    oracle = Oracle(network(), optimizer)
    oracle.see(data(UNFINISHED * (dist.get_world_size() // 2)), 3)
    assert oracle.error(sharded) <= FLOAT64
    return numbers(sharded)


def loaded_inside(
    rank: int, folder: str, first: int, sync: str, optimizer: str, way: str = "get_state_dict", flat: bool = False
) -> list[Any]:
    """Go on from there in a new process. Returns the parameters."""
    sharded, wrapped = built(sync, optimizer)
    if way == "get_state_dict":
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optimizer_state = get_state_dict(sharded, wrapped, options=options)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(
            sharded, wrapped, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
        )
    else:
        model_state, optimizer_state = sharded.state_dict(), wrapped.state_dict()
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        wrapped.load_state_dict(optimizer_state)
    assert wrapped.micro_batches == first % 3
    train_on(sharded, wrapped, data(UNFINISHED * (dist.get_world_size() // 2))[rank][first:], weighed=True)
    return numbers(sharded)


def full_state_dict(rank: int) -> tuple[list[Any], list[Any]]:
    """An open window through a full state dict, as rank 0 would save it: the ranks take their shards of it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    sharded, wrapped = built("window", "adam")
    batches = data(UNFINISHED)[rank]
    train_on(sharded, wrapped, batches[:4], weighed=True)
    received: list[Any] = [copy.deepcopy(get_state_dict(sharded, wrapped, options=options))]
    train_on(sharded, wrapped, batches[4:], weighed=True)
    again, other = built("window", "adam")
    dist.broadcast_object_list(received)
    model_state, optimizer_state = received[0]
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    train_on(again, other, batches[4:], weighed=True)
    return numbers(sharded), numbers(again)


def loaded_elsewhere(rank: int, folder: str, steps: int, optimizer: str) -> float:
    """The first window of two ranks, two micro-batches of three each, goes on over other ranks with other rows."""
    model = network()
    oracle = Oracle(model, optimizer)
    sharded, wrapped = built("window", optimizer, steps)
    model_state, optimizer_state = get_state_dict(sharded, wrapped)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(sharded, wrapped, model_state_dict=model_state, optim_state_dict=optimizer_state)
    there = data(UNFINISHED)
    here = data([[3, 4, 2, 7], [5, 1, 4, 2], [2, 2, 6, 3]][: dist.get_world_size()], epoch=1)
    oracle.update(concatenated([rows for own in there for rows in own[:2]] + [own[0] for own in here]))
    oracle.update(concatenated([rows for own in here for rows in own[1:]]))
    train_on(sharded, wrapped, here[rank], weighed=True)
    assert wrapped.updates == 2
    return oracle.error(sharded)


def saved_before_training(rank: int) -> float:
    """Asking for a state dict is no update, though torch makes the optimizer's state for it by a step."""
    sharded, wrapped = built("window", "adam")
    batches = data(UNFINISHED)[rank]
    get_state_dict(sharded, wrapped)
    train_on(sharded, wrapped, batches[:1], weighed=True)
    get_state_dict(sharded, wrapped)
    train_on(sharded, wrapped, batches[1:], weighed=True)
    plain, other = built("window", "adam")
    train_on(plain, other, batches, weighed=True)
    return relative_error(whole(sharded), whole(plain))


def flushed_at_once(rank: int, sync: str) -> float:
    """A new model goes on from an open window, which is flushed before any forward pass."""
    sharded, wrapped = built(sync, "adam")
    batches = data([[4, 2], [3, 5]])
    train_on(sharded, wrapped, batches[rank], weighed=True)
    model_state, optimizer_state = get_state_dict(sharded, wrapped)
    wrapped.discard()
    sharded, wrapped = built(sync, "adam")
    set_state_dict(sharded, wrapped, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert wrapped.flush()
    train_on(sharded, wrapped, batches[rank], weighed=True)
    wrapped.flush()
    oracle = Oracle(network(), "adam")
    oracle.see(batches, 2)
    oracle.see(batches, 2)
    return oracle.error(sharded)


def with_an_older_torch(rank: int) -> str:
    """What a wrapper of a sharded model says with a torch that can't do what it needs."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = shard(network(), mesh)
    kept, torch.__version__ = torch.__version__, type(torch.__version__)("2.12.1")
    try:
        Optimizer(OPTIMIZERS["sgd"](sharded.parameters()), steps=2, model=sharded)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.__version__ = kept
    return ""
