"""What goes wrong on all ranks has a name; what goes wrong on one ends the others by the process group's error."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradaccum.errors import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.torch.distributed.problems import (
    SYNCS,
    Heads,
    data,
    error_of,
    lines_of,
    loss_of,
    network,
    sgd,
    shard,
    spread,
    step_of,
    train_on,
    wrap,
)
from tests.torch.distributed.processes import Raised, on_ranks, wait_no_longer_than
from tests.torch.distributed.test_windows import train

FOUR = [[4] * 4] * 2
VALUE, WINDOW = "ValueError", "WindowError"


def wrapped(model, inner=None, steps=2, **keywords):
    return Optimizer(sgd(model) if inner is None else inner, steps=steps, model=model, **keywords)


def ddp():
    return DistributedDataParallel(network())


def shards():
    return shard(network())


def local_sgd(model):
    state = post_localSGD_hook.PostLocalSGDState(None, None, 100)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return model


def post_local(inner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script
        from torch.distributed.optim import PostLocalSGDOptimizer
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=0))


def parameters_not_sharded(rank):
    model = network()
    fully_shard(model[0])
    wrapped(model)


def joined(rank):
    replica, optimizer = wrap("ddp", network())
    with replica.join():
        train_on(replica, optimizer, data([[4] * 4, [4] * 2])[rank])


def lbfgs(rank, make, splits):
    inner = torch.optim.LBFGS((model := make()).parameters())
    if splits:
        TrainStep(model, inner, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)
    else:
        wrapped(model, inner, 1)


def unknown(rank, engine, steps):
    """A data-parallel model, and no model=."""
    used = spread(engine, network())
    train_on(used, Optimizer(sgd(used), steps=steps), data(FOUR)[rank])


def different_options(rank, way, option, values):
    if way == "wrapped":
        wrapped(ddp(), **{option: values[rank]})
        return
    adds = values[rank] if option == "reduction" else "mean"
    step_of(ddp(), compute_loss=lambda m, x, y: cross_entropy(m(x), y, reduction=adds), **{option: values[rank]})


def differing_option(way, name, first, second):
    shown = [value and "given" if name == "weight" else value for value in (first, second)]
    values = "" if name == "noise_scale" else f". Received: {shown[0]!r} on rank 0, {shown[1]!r} on rank 1"
    says = f"`{name}` must be the same on every rank{values}"
    return VALUE, says, lambda rank: different_options(rank, way, name, (first, second))


def different_hyperparameters(rank, name, values, way):
    model = ddp()
    inner = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=torch.tensor(0.1), foreach=False)
    inner.param_groups[2][name] = values[rank]
    if way == "wrapped":
        train_on(model, wrapped(model, inner), data(FOUR)[rank])
        return
    step = TrainStep(model, inner, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)
    step(*data(FOUR)[rank][0])


def differing_hyperparameter(way, name, first, second):
    a, b = ([*value] if isinstance(value, tuple) else float(value) for value in (first, second))
    says = f"{name} of group 2 is {a} on rank 0, {b} on rank 1. Nothing was updated"
    return WINDOW, says, lambda rank: different_hyperparameters(rank, name, (first, second), way)


def schedule_stepped_in_the_body(rank):
    """Rank 1's loop is over when two updates are to come, and an average's hook hides the line that says it."""
    model, optimizer = wrap("ddp", network(), 1)
    optimizer.register_step_post_hook(lambda *_: None)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for rows in optimizer.batches(data([[4] * 3, [4] * 1])[rank]):
        train_on(model, optimizer, [rows])
        if optimizer.updated:
            schedule.step()


def different_steps(rank, schedule):
    replica, optimizer = wrap("ddp", network(), (lambda *_: 2 + 2 * rank) if schedule else 2 + 2 * rank)
    train_on(replica, optimizer, data(FOUR)[rank])


def different_ways(rank, first, second="plain", name_later=False):
    """How ranks weigh their micro-batches, or how all of them do at first and later."""
    replica, optimizer = wrap("ddp", network(), 1 if name_later else 2)
    for i, rows in enumerate(data(FOUR)[rank]):
        train_on(replica, optimizer, [rows], (first, second)[min(i, 1) if name_later else rank])


def different_parts(rank, way, sync):
    heads = [[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]]
    train(rank, [[4] * 6] * 2, 2, way, engine="fsdp2 nested", build=Heads, heads=heads, sync=sync)


def edited(rank, engine, steps):
    """Clipping what an open window has added up, on every micro-batch, as a plain loop does."""
    model, optimizer = wrap(engine, network(), steps)
    for rows in data([[4, 2, 5, 3]] * 2)[rank]:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def uneven(rank, way, sync):
    """Rank 1 has a whole window less in its second epoch."""
    model, optimizer = wrap("fsdp2", network(), sync=sync)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if way == "scaler" else None
    for sizes in ([[4] * 3] * 2, [[4] * 4, [4] * 2]):
        train_on(model, optimizer, optimizer.batches(data(sizes)[rank]), "plain" if scaler else "weighed", scaler)


def fail_in(layer):
    return layer.weight.register_hook(lambda _: 1 / 0)


def failed_before(rank, where):
    """The pass that reduces window 2 fails on all ranks, or leaves a parameter out; the window is dropped, twice."""
    model = Heads() if where == "unused" else network()
    replica, optimizer = wrap("ddp", model)
    rows = data([[4] * 2] * 2)[rank]
    train_on(replica, optimizer, rows)
    train_on(replica, optimizer, rows[:1])
    hook = model.trunk.bias.register_hook(lambda _: None) if where == "unused" else fail_in(model[where])
    said = error_of(lambda: train_on(replica, optimizer, rows[:1]))
    assert said.startswith("WindowError: DistributedDataParallel" if where == "unused" else "ZeroDivisionError: ")
    hook.remove()
    optimizer.discard()
    with pytest.raises(WindowError, match="an earlier window's gradients"):
        train_on(replica, optimizer, rows)
    optimizer.discard()
    train_on(replica, optimizer, rows)


def penalty_later(rank, together):
    """The backward pass of a penalty, for the first time when the third window closes.

    `together`: both forward passes come before both backward passes.
    """
    replica, optimizer = wrap("ddp", network())
    for i, rows in enumerate(optimizer.batches(data([[4, 3] * 5, [2, 5] * 5])[rank])):
        optimizer.zero_grad()
        losses = [lambda rows=rows: loss_of(replica, rows)]
        if i == 5:
            losses.append(lambda rows=rows: replica(rows[0] * 0.5).square().sum(1).mean())
        for loss in [found() for found in losses] if together else losses:
            (loss if isinstance(loss, torch.Tensor) else loss()).backward()
        optimizer.step()


EVALUATES = "LBFGS evaluates its closure several times in an update, and each time 2 ranks"
FEWER = "needs the same number of batches on every rank. Whether the epoch is over: False on rank 0, True on rank 1"
OPTIONS = [
    ("wrapped", "clip_grad_norm", None, 0.05),
    ("wrapped", "reduction", "mean", "sum"),
    ("wrapped", "nonfinite", "propagate", "skip_window"),
    ("wrapped", "accumulate_dtype", None, torch.float64),
    ("wrapped", "noise_scale", True, False),
    ("wrapped", "sync", "window", "micro_batch"),
    ("TrainStep", "clip_grad_norm", 1.0, 0.05),
    ("TrainStep", "reduction", "mean", "sum"),
    ("TrainStep", "accumulate_dtype", None, torch.float64),
    ("TrainStep", "weight", len, None),
    ("TrainStep", "batch_norm", "pooled", "frozen"),
]
HYPERPARAMETERS = [  # before the update
    ("wrapped", "betas", (0.9, 0.99), (0.9, 0.95)),
    ("wrapped", "lr", torch.tensor(0.5), torch.tensor(0.25)),
    ("TrainStep", "weight_decay", 0.1, 0.2),
]
LOCAL, UNKNOWN = "PostLocalSGDOptimizer(Optimizer(", "Pass model=, the sharded model"
STEPPED = "Ranks have different hyperparameters: lr is 0.025 on rank 0, 0.05 on rank 1"
REDUCED, EDITED = "was changed after a backward pass had reduced it", "The gradients were edited"
BEFORE, UNWEIGHED = "an earlier window's gradients", "weighed on rank 0, without a weight on rank 1"
REFUSED = {
    # Which error it is on every rank, what that says, and what each rank does.
    "wrapped twice": (VALUE, "", lambda rank: wrapped(replica := ddp(), wrapped(replica))),
    "wrapped later": (VALUE, "after the optimizer was built", lambda rank: train_on(
        optimizer=wrapped(m := network()), model=DistributedDataParallel(m), batches=data(FOUR)[rank]
    )),
    "sharded later": (VALUE, "Shard the model first", lambda rank: wrapped(inner=sgd(m := network()), model=shard(m))),
    "parameters outside": (VALUE, "in none of `model`'s", lambda rank: wrapped(
        replica := ddp(), torch.optim.SGD([*replica.parameters(), *nn.Linear(2, 2).parameters()], 0.1)
    )),
    "parameters not sharded": (VALUE, "are not sharded", parameters_not_sharded),
    **{
        f"LBFGS, {make.__name__}, {splits=}": (VALUE, EVALUATES, lbfgs, make, splits)
        for make in (ddp, shards) for splits in (False, True)
    },
    "local SGD by a hook": (VALUE, "post_localSGD_hook", lambda rank: wrapped(local_sgd(ddp()))),
    "local SGD by an optimizer": (VALUE, LOCAL, lambda rank: wrapped(replica := ddp(), post_local(sgd(replica)))),
    "a sparse table": (VALUE, "Use sparse=False", lambda rank: wrap("ddp", nn.Embedding(9, 3, sparse=True))),
    "join()": (VALUE, "Leave it out", joined),
    "a model under DDP that the optimizer doesn't know": (VALUE, "Pass model=ddp", unknown, "ddp", 2),
    "shards that the optimizer doesn't know": (VALUE, UNKNOWN, unknown, "fsdp2", 2),
    **{f"{one[0]}, options that differ: {one[1]}": differing_option(*one) for one in OPTIONS},
    **{f"{one[0]}, hyperparameters that differ: {one[1]}": differing_hyperparameter(*one) for one in HYPERPARAMETERS},
    "a schedule stepped in the loop's body": (WINDOW, STEPPED, schedule_stepped_in_the_body),
    "steps that differ at the start": (VALUE, "2 on rank 0, 4 on rank 1", different_steps, False),
    "steps that differ at the window": (WINDOW, "2 on rank 0, 4 on rank 1", different_steps, True),
    "weights on some ranks": (WINDOW, UNWEIGHED, different_ways, "weighed", "plain"),
    **{
        f"parts sharded by themselves, {how}": (WINDOW, "different parts", different_parts, *how)
        for how in (("batches", "window"), ("batches", "micro_batch"), ("backward", "window"))
    },
    **{f"clipping inside of a window, {how}": (WINDOW, EDITED, edited, *how) for how in (("fsdp2", 3), ("ddp", 3))},
    "clipping replicas that are not reduced yet": (WINDOW, EDITED, edited, "ddp", 1),
    **{
        f"shards with different numbers of batches, {way}, {sync}": (WINDOW, FEWER, uneven, way, sync)
        for way in ("plain", "scaler") for sync in SYNCS
    },
    **{f"behind a window whose pass failed, {at}": (WINDOW, BEFORE, failed_before, at) for at in (0, 2, "unused")},
    **{
        f"a second backward pass behind a reduction, {together=}": (WINDOW, REDUCED, penalty_later, together)
        for together in (False, True)
    },
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@on_ranks()
def test_what_cannot_be_right_is_named_on_every_rank(rank, what):
    kind, says, run, *arguments = REFUSED[what]
    said = error_of(lambda: run(rank, *arguments))
    assert said.startswith(kind + ": ")
    assert says in said


@pytest.mark.parametrize(("engine", "says"), [("ddp", "Pass model=ddp"), ("fsdp2", "Pass model=, the sharded")])
@on_ranks()
def test_a_model_that_the_optimizer_is_not_told_of_is_a_warning_where_it_can_work(rank, engine, says):
    assert len([line for line in lines_of(lambda: unknown(rank, engine, 1)) if says in line]) == 1


@on_ranks()
def test_optimizers_on_parts_of_one_sharded_model_are_refused(rank):
    """The first one's turn comes again when the other is gone."""
    model = shards()
    Optimizer(sgd(model[2]), steps=2, model=model)
    optimizer = Optimizer(sgd(model[0]), steps=2, model=model)
    with pytest.raises(ValueError, match="Another wrapped optimizer has other parameters of this sharded model"):
        Optimizer(sgd(model[2]), steps=2, model=model)
    train_on(model, optimizer, data([[4] * 2] * 2)[rank])
    assert optimizer.updates == 1


@on_ranks()
def test_one_rank_s_open_window_is_not_another_s(rank):
    """Every rank loads what rank 0 saved inside a window."""
    replica, optimizer = wrap("ddp", network(), 4)
    train_on(replica, optimizer, data([[4] * 2] * 2)[rank])
    state = optimizer.state_dict()
    state["gradaccum"]["rank"] = [0, 2]
    optimizer.discard()
    if rank == 0:
        optimizer.load_state_dict(state)
    else:
        with pytest.raises(WindowError, match="on rank 0 of 2"):
            optimizer.load_state_dict(state)


@on_ranks()
def test_an_older_torch_is_named(rank):
    model, kept = shards(), torch.__version__
    torch.__version__ = type(kept)("2.12.1")
    try:
        with pytest.raises(RuntimeError, match="^A model under fully_shard needs torch 2.13 .*, and this is 2.12.1"):
            wrapped(model)
    finally:
        torch.__version__ = kept


GIVES_UP = 1.5
"""Seconds after which the process group of these tests gives up."""


def fails(rank, engine, way, what, at=2):
    """Something happens on rank 1 in a micro-batch, inside a window; errors are handled, and the process lives on."""
    model, optimizer = wrap(engine, network(), 4)
    wait_no_longer_than(GIVES_UP)

    def failure(*_):
        raise ArithmeticError("rank 1 failed")

    def loader():
        for i, rows in enumerate(data([[4] * 8] * 2)[rank][: at if what == "fewer" and rank == 1 else None]):
            if what == "loader" and (rank, i) == (1, at):
                failure()
            yield rows

    for i, rows in enumerate(optimizer.batches(loader()) if way == "batches" else loader()):
        here = what if (rank, i) == (1, at) else ""
        if here == "break":
            break
        if here == "dies":
            os._exit(1)
        if here == "is late":
            time.sleep(2 * GIVES_UP)
        optimizer.zero_grad()
        if here == "forward":
            failure()
        loss = loss_of(model, rows)
        if here == "backward":
            loss.register_hook(failure)
        if here == "last gradient":
            fail_in(model.module[0])
        if here == "closure":
            optimizer.step(failure)
        optimizer.backward(loss, weight=4)
        optimizer.step()
    if what != "break":  # a rank that ends its epoch takes part in the others' windows with weight 0
        optimizer.flush()


def step_fails(rank, what):
    """TrainStep fails on rank 1: its labels are too few, or it has no rows for a loss that needs some."""

    def loss(m, x, y):
        return cross_entropy(m(x).view(len(x), -1) if what == "no rows" else m(x), y)

    step = step_of(ddp() if what == "labels" else shards(), compute_loss=loss, verify=True)
    wait_no_longer_than(GIVES_UP)
    x, y = data([[8], [0 if what == "no rows" else 8]])[rank][0]
    step(x, y[: 8 - rank] if what == "labels" else y)


def never_built(rank, splits):
    replica = ddp()
    wait_no_longer_than(GIVES_UP)
    step_of(replica, micro_batch_size=4 - 4 * rank) if splits else wrapped(replica, steps=2 - 2 * rank)


ARITHMETIC = "ArithmeticError"
ONE_RANK = {
    # What that rank says, and what each does.
    **{
        f"raises in {where}, {way}": (ARITHMETIC, fails, "ddp", way, where)
        for where, way in (("forward", "batches"), ("backward", "plain"), ("closure", "plain"), ("loader", "batches"))
    },
    "raises where DDP has begun to reduce": ("ZeroDivisionError", fails, "ddp", "plain", "last gradient", 3),
    "breaks off alone": ("", fails, "ddp", "batches", "break"),
    "dies": ("", fails, "ddp", "plain", "dies"),
    "is late": ("RuntimeError", fails, "ddp", "plain", "is late", 3),
    "raises under shards": (ARITHMETIC, fails, "fsdp2", "plain", "forward"),
    "has fewer batches under shards": ("RuntimeError", fails, "fsdp2", "batches", "fewer"),
    "raises in TrainStep": ("ValueError", step_fails, "labels"),
    "has no rows for shards": ("ValueError", step_fails, "no rows"),
    **{f"builds nothing, {splits=}": ("ValueError", never_built, splits) for splits in (False, True)},
}


def failed(rank, what):
    """What this rank says, after which time, and whether an update has been made."""
    _, run, *arguments = ONE_RANK[what]
    made, began = [], time.monotonic()
    counting = register_optimizer_step_post_hook(lambda *_: made.append(1))
    try:
        said = error_of(lambda: run(rank, *arguments))
    finally:
        counting.remove()
    return said, time.monotonic() - began, bool(made)


@pytest.mark.parametrize("what", ONE_RANK)
def test_one_rank_that_fails_ends_the_others_in_bounded_time_by_their_process_group_s_error(fragile_ranks, what):
    """As in plain DDP and FSDP: gloo says that the connection is closed, or that nothing came within the timeout."""
    own, *_ = ONE_RANK[what]
    (said, seconds, made), *second = fragile_ranks.try_run(failed, what)
    assert said.startswith(("RuntimeError", "DistBackendError"))
    assert "gloo" in said or "pair closure" in said
    assert seconds < GIVES_UP + 15  # on a machine that is busy
    assert not made
    if what == "dies":
        assert isinstance(second[0], Raised)
        assert seconds < GIVES_UP
    else:
        assert second[0][0].partition(":")[0] == own
        assert not second[0][2]


CHANGES = {
    "edited": lambda model: [p.grad.mul_(0.5) for p in model.parameters()],
    "filled with zero": lambda model: model.zero_grad(set_to_none=False),
    "cleared": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize(("in_views", "set_to_none"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("when", ["before the forward pass", "after it"])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks()
def test_a_sum_that_is_changed_before_the_pass_that_reduces_it_is_refused(rank, change, when, in_views, set_to_none):
    """In window 2, in which everything is looked at, and in window 3."""
    for windows in (2, 3):
        replica, optimizer = wrap("ddp", network(), 2, {"gradient_as_bucket_view": in_views})
        *others, last = data([[4] * 2 * windows] * 2)[rank]
        for rows in others:
            optimizer.zero_grad(set_to_none)
            loss_of(replica, rows).backward()
            optimizer.step()
        before = [p.detach().clone() for p in replica.parameters()]
        with pytest.raises(WindowError, match="inside an open window"):
            if when == "before the forward pass":
                CHANGES[change](replica)
            loss = loss_of(replica, last)
            if when == "after it":
                CHANGES[change](replica)
            loss.backward()
        assert all(map(torch.equal, replica.parameters(), before))


@pytest.mark.parametrize("in_views", [False, True])
@pytest.mark.parametrize("batches", [3, 4])
@on_ranks("fragile_ranks")
def test_a_loop_without_zero_grad_is_refused(rank, batches, in_views):
    replica, optimizer = wrap("ddp", network(), 2, {"gradient_as_bucket_view": in_views})
    with pytest.raises(WindowError, match="left from the last window"):
        for rows in optimizer.batches(data([[4] * batches] * 2)[rank]):
            loss_of(replica, rows).backward()
            optimizer.step()
    assert optimizer.updates == 1
