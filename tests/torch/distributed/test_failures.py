"""What goes wrong on one rank is a clear error on every rank; nobody waits for ever."""

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
    slowly,
    spread,
    step_of,
    train_on,
    wrap,
)
from tests.torch.distributed.processes import TIMEOUT, Raised, on_ranks, wait_no_longer_than
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
    """Rank 1 has fewer batches in its second epoch, which end within a window or between two."""
    model, optimizer = wrap("fsdp2", network(), sync=sync)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if way == "scaler" else None
    for sizes in ([[4] * 3] * 2, [[4] * 5, [4] * (4 if way == "between" else 3)]):
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


def penalty_later(rank, of, together):
    """The backward pass of a penalty, for the first time when the third window closes, on some ranks.

    `together`: both forward passes come before both backward passes.
    """
    replica, optimizer = wrap("ddp", network())
    for i, rows in enumerate(optimizer.batches(data([[4, 3] * 5, [2, 5] * 5])[rank])):
        optimizer.zero_grad()
        losses = [lambda rows=rows: loss_of(replica, rows)]
        if i == 5 and rank in of:
            losses.append(lambda rows=rows: replica(rows[0] * 0.5).square().sum(1).mean())
        for loss in [found() for found in losses] if together else losses:
            (loss if isinstance(loss, torch.Tensor) else loss()).backward()
        optimizer.step()


EVALUATES = "LBFGS evaluates its closure several times in an update, and each time 2 ranks"
FEWER = "needs the same number of batches on every rank. Whether this batch is the last: False on rank 0"
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
        for way in ("within", "between", "scaler") for sync in SYNCS
    },
    **{f"behind a window whose pass failed, {at}": (WINDOW, BEFORE, failed_before, at) for at in (0, 2, "unused")},
    **{
        f"a second backward pass behind a reduction, {together=}": (WINDOW, REDUCED, penalty_later, (0, 1), together)
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


@pytest.mark.parametrize("splits", [False, True])
@on_ranks()
def test_a_rank_whose_constructor_raises_is_an_error_on_the_others_at_once(rank, splits):
    """It is then built again on both ranks."""
    replica = ddp()
    with pytest.raises(ValueError if rank else WindowError, match="" if rank else "Rank 1 raised .* while it built"):
        step_of(replica, micro_batch_size=4 - 4 * rank) if splits else wrapped(replica, steps=2 - 2 * rank)
    train_on(replica, wrapped(replica), data(FOUR)[rank])


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


KEPT = []


def fails(rank, engine, way, what, at=2, given_up=None):
    """Something happens on rank 1 in a micro-batch, inside a window; errors are handled, and the process lives on.

    Where the other learns it by waiting, both do so for a second and a half from there on, until it has `given_up`.
    """
    model, optimizer = wrap(engine, network(), 4)
    assert optimizer._windows.ranks.channel.timeout() == TIMEOUT  # the process group's

    def failure(*_):
        raise ArithmeticError("rank 1 failed")

    def loader():
        for i, (x, y) in enumerate(data([[4] * 8] * 2)[rank][: at if what == "fewer" and rank == 1 else None]):
            here = (rank, i) == (1, at)
            if here and what == "loader":
                failure()
            yield (x, y[:1]) if here and what == "rows" else (x, y)

    for i, rows in enumerate(optimizer.batches(loader()) if way == "batches" else loader()):
        here = what if (rank, i) == (1, at) else ""
        if i == at and given_up is not None:
            wait_no_longer_than(1.5)
        if here == "break":
            break
        if here == "dies":
            os._exit(1)
        while here == "is late" and given_up is not None and not given_up.exists():
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
        wait_no_longer_than(1.5)
        optimizer.flush()


def step_fails(rank, what):
    """TrainStep fails on rank 1: its labels are too few, or it has no memory, or no rows for a loss that needs some."""

    def loss(m, x, y):
        if rank == 1 and what == "memory":
            raise torch.OutOfMemoryError("no memory")
        return cross_entropy(m(x).view(len(x), -1) if what == "no rows" else m(x), y)

    step = step_of(ddp() if what == "labels" else shards(), compute_loss=loss, verify=True)
    x, y = data([[8], [0 if what == "no rows" else 8]])[rank][0]
    step(x, y[: 8 - rank] if what == "labels" else y)


LEFT, MEMORY, ARITHMETIC = "Rank 1 stopped in the middle", "OutOfMemoryError: ", "ArithmeticError: "
ONE_RANK = {
    # What the other says, what that rank itself says, and what each does.
    **{
        f"raises in {where}, {way}": (LEFT, ARITHMETIC, fails, "ddp", way, where)
        for where in ("forward", "backward", "closure")
        for way in ("batches", "plain")[where == "closure" :]
    },
    "has a second backward pass behind a reduction": (LEFT, "WindowError: ", penalty_later, (1,), False),
    "has one after both forward passes": (LEFT, "WindowError: ", penalty_later, (1,), True),
    "breaks off alone": (LEFT, "", fails, "ddp", "batches", "break"),
    "raises in TrainStep": ("Rank 1 stopped", "ValueError: ", step_fails, "labels"),
    "has no rows for shards": ("WindowError", "ValueError: This rank has no rows for a pass", step_fails, "no rows"),
    "runs out of memory before the first pass": ("on rank 1", MEMORY, step_fails, "memory"),
}
BATCHES = {
    f"has a batch that cannot be used, {engine}, {why}, at {at}": (LEFT, own, fails, engine, "batches", why, at)
    for at in range(5)
    for why, own in (("rows", "ValueError: "), ("loader", ARITHMETIC))
    for engine in ("ddp", "fsdp2")
}
ENDS = [what for what in BATCHES if what.endswith(("0", "4"))]


@pytest.mark.parametrize("what", slowly([*ONE_RANK, *ENDS], [what for what in BATCHES if what not in ENDS]))
@on_ranks()
def test_one_rank_that_fails_is_an_error_on_the_others_at_once(rank, what):
    others, own, run, *arguments = {**ONE_RANK, **BATCHES}[what]
    said = error_of(lambda: run(rank, *arguments))
    if rank == 0:
        assert said.startswith(MEMORY if own == MEMORY else "WindowError: ")
        assert others in said
    else:
        assert said.startswith(own)
        assert bool(said) == bool(own)


def never_built(rank):
    replica = ddp()
    wait_no_longer_than(1.5)
    if rank == 0:
        wrapped(replica)
    raise ArithmeticError("rank 1 failed")


def test_a_rank_that_builds_nothing_is_an_error_after_the_process_group_s_timeout(fragile_ranks):
    first, _ = fragile_ranks.try_run(never_built)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "waited for the other ranks to build their Optimizer or TrainStep" in first.message


@pytest.mark.parametrize(
    ("engine", "what"), [("ddp", "dies"), ("ddp", "is late"), ("fsdp2", "fewer"), ("fsdp2", "forward")]
)
def test_ranks_that_wait_for_one_that_is_gone_wait_no_longer_than_the_process_group(
    fragile_ranks, tmp_path, engine, what
):
    at = 3 if what == "is late" else 2
    first, second = fragile_ranks.try_run(fails, engine, "plain", what, at, tmp_path / "given up")
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert engine != "ddp" or first.kind == "WindowError"
    assert what != "dies" or "is gone" in first.message
    assert what != "forward" or second.kind == "ArithmeticError"


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
