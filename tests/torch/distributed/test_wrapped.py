"""Wrapped optimizers over several ranks, beside their updates: messages, hooks, buffers, freezing, noise."""

import contextlib
import copy  # no postponed annotations here: DDP reads those of its hooks
import gc
import itertools
import statistics
import threading
from collections import Counter
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradaccum import WindowError
from gradaccum.on_torch.private import timeout_of
from gradaccum.torch.distributed import Channel
from gradaccum.torch.distributed.messages import Kind
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import (
    RAGGED,
    SIX,
    SYNCS,
    Fragile,
    Oracle,
    check_steps,
    collectives,
    concatenated,
    data,
    lines_of,
    loss_of,
    network,
    reducing,
    sgd,
    shard,
    slowly,
    spread,
    step_of,
    train_on,
    wrap,
)
from tests.torch.distributed.processes import on_ranks
from tests.torch.distributed.test_windows import LAYERS
from tests.torch.problems import Does
from tests.torch.test_calls import Calls


@pytest.mark.parametrize("steps", [1, 2, 4])
@on_ranks()
def test_two_optimizers_in_one_loop_close_their_windows_in_turns(rank, steps):
    models, ranks = [network(), network()], data(RAGGED)
    oracles = [Oracle(model) for model in models]
    replicas, optimizers = zip(*(wrap("ddp", model, steps) for model in models), strict=True)
    for _ in range(2):
        for rows in ranks[rank]:
            for replica, optimizer in zip(replicas, optimizers, strict=True):
                train_on(replica, optimizer, [rows], "weighed")
        for optimizer in optimizers:
            optimizer.flush()
        for oracle in oracles:
            oracle.see(ranks, steps)
    for oracle, model, optimizer in zip(oracles, models, optimizers, strict=True):
        oracle.check(model)
        assert optimizer.updates == 2 * -(-6 // steps)


@pytest.mark.parametrize(
    ("steps", "which", "unused"),
    [((1, 1), "a b", True), ((2, 3), "a b", False), ((2, 3), "ab ab", True), ((2, 2), "ab ab", False)],
)
@on_ranks()
def test_two_optimizers_on_parts_of_one_model_close_their_windows_in_turns_as_a_gans(rank, steps, which, unused):
    run = lambda m, x, which: m.a(x) + m.b(x) if which == "ab" else m.get_submodule(which)(x)  # noqa: E731
    model = Does(run, a=network(), b=network())
    plain, replica = copy.deepcopy(model), DistributedDataParallel(model, find_unused_parameters=unused)
    parts, others = [replica.module.a, replica.module.b], [plain.a, plain.b]
    optimizers = [Optimizer(sgd(m), n, model=replica) for m, n in zip(parts, steps)]
    expected, weights, ranks = [*map(sgd, others)], [0, 0], data(SIX)
    for i, own in enumerate(ranks[rank]):
        for k, (optimizer, name) in enumerate(zip(optimizers, which.split())):
            optimizer.zero_grad()
            parts[1 - k].requires_grad_(False)
            optimizer.backward(cross_entropy(replica(own[0], name), own[1]), weight=len(own[0]))
            optimizer.step()
            parts[1 - k].requires_grad_(True)
            x, y = concatenated([both[i] for both in ranks])  # with the other part as it is now
            cross_entropy(plain(x, name), y, reduction="sum").backward(inputs=[*others[k].parameters()])
            weights[k] += len(x)
            if optimizer.updated:
                for parameter in others[k].parameters():
                    parameter.grad /= weights[k]
                expected[k].step()
                expected[k].zero_grad()
                weights[k] = 0
    assert relative_error(model.parameters(), plain.parameters()) <= FLOAT64


@pytest.mark.parametrize(("steps", "part"), [(1, True), (2, False), (3, True), (3, False)])
@on_ranks()
def test_a_loop_may_run_in_the_models_forward_pass_as_lightnings_does(rank, steps, part):
    """Of a DistributedDataParallel module that Lightning calls with the body, under manual optimization."""
    model, ranks = Does(lambda m, body: body(m.model), model=network()), data(SIX)
    oracle, replica = Oracle(model.model), DistributedDataParallel(model)
    optimizer = Optimizer(sgd(replica), steps, model=model.model if part else replica)
    oracle.see(ranks, steps)

    def body(rows):
        def run(m):
            optimizer.zero_grad()
            loss = loss_of(m, rows)
            if replica.require_backward_grad_sync:  # what Lightning does before each backward pass
                replica.reducer._rebuild_buckets()
                replica.reducer.prepare_for_backward([])
            optimizer.backward(loss, weight=len(rows[0]))
            optimizer.step()
            replica.require_backward_grad_sync = False

        return run

    for rows in ranks[rank]:
        replica(body(rows))
        replica.require_backward_grad_sync = True
    assert optimizer.updates == 6 // steps
    oracle.check(model.model)


AT_ONCE = AT_END = {"WINDOW": 1, "reduction": 1}
SHARDED = {"WINDOW": 1, "all_gather": 7, "reduce_scatter": 2}
COLLECTIVES = {
    # An ordinary window of two micro-batches, by what each is for. WINDOW: "I come to the reduction", with the window's
    # weight; TOTAL: its weight, where only the pass shows it; NUMBER: numbers of all ranks.
    ("ddp", "plain"): AT_ONCE,
    ("ddp", "batches"): AT_ONCE,
    ("ddp", "weighed"): AT_ONCE,
    ("ddp", "batches weighed"): AT_ONCE,
    ("ddp", "GradScaler"): {**AT_ONCE, "TOTAL": 1},  # its verdict
    ("ddp", "TrainStep"): AT_END,
    **{("ddp", f"TrainStep, {how}"): AT_END for how in ("weight", "told", "sum", "classes")},
    ("ddp", "TrainStep, named"): {**AT_END, "NUMBER": 1},
    # Two layers and what is around them, each gathered for a pass.
    ("fsdp2", "plain"): SHARDED,
    ("fsdp2", "weighed"): SHARDED,
    ("fsdp2", "batches"): SHARDED,
    # Passes, weights, and before each collective: "I am about to begin it".
    ("fsdp2", "TrainStep"): {**SHARDED, "all_gather": 6, "NUMBER": 11},
}
IN_THE_FIRST = {"batches": 1, "batches weighed": 1, "GradScaler": -1}
IN_THE_FIRST |= {
    "TrainStep": 2,
    "TrainStep, told": 2,
    "TrainStep, classes": 2,
    "TrainStep, weight": 1,
    "TrainStep, sum": 1,
}
"""More of them: that an epoch begins; what losses are and weigh. Its reduction comes at the end."""


def trained_by(way, used, batches, scaler=None):
    """An iterator that makes a window with each step, and the channel of its messages."""
    if not way.startswith("TrainStep"):
        optimizer = Optimizer(sgd(used), steps=2, model=used)
        loader = optimizer.batches(batches) if "batches" in way else batches
        how = way.removeprefix("batches").strip() or "plain"

        def wrapped():
            for i, rows in enumerate(loader):
                train_on(used, optimizer, [rows], how, scaler)
                if i % 2:
                    yield optimizer.updates

        return wrapped(), optimizer._windows.ranks.channel
    keywords = {
        "TrainStep": dict,
        "TrainStep, weight": lambda: {"compute_loss": loss_of_rows, "weight": lambda x, y: len(x)},
        "TrainStep, told": lambda: {"compute_loss": lambda m, x, y: (loss_of_rows(m, x, y), len(x))},
        "TrainStep, sum": lambda: {"loss_fn": nn.CrossEntropyLoss(reduction="sum")},
        "TrainStep, classes": lambda: {"loss_fn": nn.CrossEntropyLoss(weight=torch.ones(3).double())},
        "TrainStep, named": lambda: {
            "compute_loss": lambda m, x, y: {"rows": loss_of_rows(m, x, y)},
            "weight": lambda x, y: {"rows": len(x)},
        },
    }
    step = step_of(used, micro_batch_size=2, **keywords[way]())
    return (step(*rows) for rows in batches), step.ranks.channel


def loss_of_rows(m, x, y):
    return cross_entropy(m(x), y)


@pytest.mark.parametrize(("engine", "way"), COLLECTIVES)
@on_ranks()
def test_an_ordinary_window_takes_no_more_collectives_than_these(rank, engine, way):
    used, sent, found = spread(engine, network()), [], []
    if engine == "ddp":
        used.register_comm_hook(lambda _: sent.append("reduction"), reducing)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if way == "GradScaler" else None
    steps, channel = trained_by(way, used, data([[4] * 40, [3] * 40])[rank], scaler)
    for name in ("texts", "broadcast", "sum"):
        setattr(channel, name, _noted(sent, name, getattr(channel, name)))
    send = channel.send
    channel.send = lambda kind, *numbers: sent.append(Kind(int(kind)).name) or send(kind, *numbers)
    with collectives() as counts:
        for _ in steps:
            found.append(Counter(sent) + counts)
            sent.clear()
            counts.clear()
    if engine == "ddp":
        for one in found:
            del one["all_reduce"]  # the communication hook's
    ordinary = COLLECTIVES[engine, way]
    assert found[1:] == [ordinary] * (len(found) - 1)
    assert engine == "fsdp2" or found[0].total() == sum(ordinary.values()) + IN_THE_FIRST.get(way, 0)


def by_hand(used, batches):
    optimizer = sgd(used)
    for i, rows in enumerate(batches):
        with contextlib.nullcontext() if i % 2 else used.no_sync():
            (loss_of(used, rows) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            yield


def calls_of(windows):
    """Of an ordinary window, Python and C together."""
    found = []
    for _ in range(15):
        with Calls() as calls:
            next(windows)
        found.append(calls.names.total())
    return statistics.median(found[8:])


@pytest.mark.parametrize(("way", "most"), [("plain", 340), ("batches", 372), ("TrainStep", 227)])
@on_ranks()
def test_an_ordinary_window_makes_no_more_calls_beyond_those_of_no_sync_by_hand(rank, way, most):
    """Two micro-batches: the message, its answers and the reduction, and what a window on one device makes."""
    rows, model = data([[4] * 30] * 2)[rank], DistributedDataParallel(network())
    expected = calls_of(by_hand(model, rows))
    assert calls_of(trained_by(way, DistributedDataParallel(network()), rows)[0]) - expected <= most


@pytest.mark.parametrize("way", ["plain", "batches weighed"])
@on_ranks()
def test_the_message_travels_during_the_backward_pass(rank, way):
    model, events = network(), []
    replica = DistributedDataParallel(model)
    steps, channel = trained_by(way, replica, data([[4] * 6, [3] * 6])[rank])
    for name in ("send", "receive"):
        setattr(channel, name, _noted(events, name, getattr(channel, name)))
    model[-1].weight.register_hook(lambda _: events.append("first gradient"))
    replica.register_comm_hook(lambda _: events.append("reduction"), reducing)
    for _ in steps:
        last = events.copy()
        events.clear()
    assert last == ["first gradient", "send", "first gradient", "reduction", "receive"]


@on_ranks()
def test_layers_are_reduced_while_the_backward_pass_goes_on(rank):
    """DDP makes its buckets by the order of the first reduction, which is the wrapper's own."""
    model, events = network(), []
    replica, optimizer = wrap("ddp", model, 1, {"bucket_cap_mb": 1e-4})
    model[0].weight.register_hook(lambda _: events.append("first layer"))
    replica.register_comm_hook(lambda _: events.append("reduction"), reducing)
    for rows in data([[4] * 5] * 2)[rank]:
        events.clear()
        train_on(replica, optimizer, [rows])
    assert events.index("reduction") < events.index("first layer")


def _noted(events, name, function):
    def call(*arguments):
        events.append(name)
        return function(*arguments)

    return call


@pytest.mark.parametrize("sync", SYNCS)
@on_ranks()
def test_parameters_stay_gathered_in_a_window_that_reduces_once(rank, sync):
    used, optimizer = wrap("fsdp2", network(), 4, {"reshard_after_forward": False}, sync=sync)
    rows = data([[4] * 8] * 2)[rank]
    train_on(used, optimizer, rows[:4], "weighed")
    with collectives() as counts:
        train_on(used, optimizer, rows[4:], "weighed")
    if sync == "window":
        assert counts["all_gather"] <= LAYERS + 1  # FSDP prefetches one layer for a forward pass that is over
    else:
        assert counts["all_gather"] >= 4 * LAYERS


@on_ranks()
def test_static_graph_is_named_in_one_line(rank):
    lines = lines_of(lambda: wrap("ddp", network(), 2, {"static_graph": True}))
    assert len([line for line in lines if "step() reduces" in line]) == 1


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@on_ranks()
def test_a_model_is_as_it_was_found_when_its_wrapper_is_gone(rank, engine):
    """No hook is left, and a plain loop reduces again."""
    model = network()
    used, rows = spread(engine, model), data([[4] * 2] * 2)[rank]

    def hooks():
        on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in used.modules())
        return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in used.parameters())

    before = hooks()
    for _ in range(3):
        optimizer = Optimizer(sgd(used), steps=2, model=used)
        train_on(used, optimizer, rows)
    del optimizer
    gc.collect()
    loss_of(used, rows[0]).backward()
    gradients = [p.grad for p in model.parameters()]
    gradient = torch.cat([(g.full_tensor() if engine == "fsdp2" else g).reshape(-1) for g in gradients])
    others = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(others, gradient)
    assert hooks() == before
    assert torch.equal(*others)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@on_ranks()
def test_optimizers_open_no_connection_no_thread_and_write_to_no_store(rank, engine):
    used, rows, process = spread(engine, network()), data([[4] * 4] * 2)[rank], psutil.Process()
    (loss_of(used, rows[0]) * 0.0).backward()
    store, held = dist.distributed_c10d._get_default_store(), set()
    for _ in range(2):
        held.add((len(process.net_connections()), process.num_fds(), threading.active_count(), store.num_keys()))
        optimizer = Optimizer(sgd(used), steps=2, model=used)
        train_on(used, optimizer, optimizer.batches(rows))
        held.add((len(process.net_connections()), process.num_fds(), threading.active_count(), store.num_keys()))
        del optimizer
        dist.barrier()
    assert len(held) == 1


@on_ranks("new_ranks")
def test_a_group_that_serves_no_cpu_has_one_gloo_group_beside_it(rank):
    """As one of NCCL's; with the same timeout, and for all optimizers."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        channels = [Channel(group), Channel(group), Channel(dist.group.WORLD, [0, 1])]
    assert channels[0]._group is channels[1]._group
    assert len({group, channels[0]._group, channels[2]._group}) == 3
    assert timeout_of(channels[0]._group) == timedelta(seconds=77)
    assert channels[0].exchange(5, rank)[1 - rank][:3] == [5, 1 - rank, 0]
    assert channels[1].texts(f"rank {rank}" * rank) == ["", "rank 1"]
    assert channels[2].sum(torch.tensor([rank, 4])).tolist() == [1, 8]
    assert channels[2].broadcast(torch.tensor([rank]), 1).tolist() == [1]


@on_ranks("fragile_ranks")
def test_a_message_that_meets_another_collective_is_an_error_and_not_a_weight(rank):
    first, second = Channel(dist.group.WORLD), Channel(dist.group.WORLD)
    with pytest.raises(WindowError, match=f"rank {1 - rank} to another collective"):
        (second if rank else first).exchange(1, 2, 3)
    if rank:
        dist.all_gather([torch.empty(24).double() for _ in range(2)], torch.ones(24).double())
    else:
        with pytest.raises(WindowError, match="Nothing was updated"):
            first.exchange(1)


@pytest.mark.parametrize("in_views", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@on_ranks()
def test_gradients_of_autograd_grad_are_those_of_the_loss_and_join_the_sum_weighed_once(rank, steps, in_views):
    replica, optimizer = wrap("ddp", model := network(), steps, {"gradient_as_bucket_view": in_views})
    oracle, parameters = Oracle(model), [*model.parameters()]
    for epoch, adds in enumerate((False, True, False)):  # from the second epoch on, a backward pass reduces
        ranks = data(RAGGED, epoch)
        for rows in optimizer.batches(ranks[rank]):
            optimizer.zero_grad()
            found, twin = torch.autograd.grad(loss_of(model, rows), parameters), copy.deepcopy(model)
            expected = torch.autograd.grad(loss_of(twin, rows), [*twin.parameters()])
            assert all(map(torch.equal, found, expected))
            if adds:
                optimizer.add_gradients(found, weight=len(rows[0]))
            else:
                loss_of(replica, rows).backward()
            optimizer.step()
        oracle.see(ranks, steps)
        oracle.check(model)


OVER, FOUR = [[4, 3, 2, 5, 4], [2, 5, 1, 2, 2]], [[4, 2, 3, 1], [3, 3, 1, 6]]
CLEARS, OVERFLOWS = {"in_batches": True, "sizes": [[4, 2, 3], [1, 4, 2]]}, {"steps": 3, "scaled": True}
DROPPED = {"open": "bD ", "reduced": "u bD ", "forward pass": "u fD ", "reduced and open": "u bD uD "}
VIEWS = [{"gradient_as_bucket_view": in_views} for in_views in (False, True)]
SCRIPTS = {
    # What happens with each micro-batch. u: the body of a loop; p: the same, without `zero_grad`; x: its loss is
    # infinite on rank 1; f: a forward pass alone; b: that and a backward pass. Then D: the window is discarded;
    # F: flushed; Z: the model clears its gradients. An epoch of batches() that is over too soon is broken off.
    "all ranks break off at once": (["u u uF", "u u u", "u u u u u"], {"in_batches": True, "sizes": OVER}),
    "what shards have added up inside FSDP": (["uD u u"], {"engine": "fsdp2"}),
    # The last window of an epoch is one micro-batch, whose pass puts the same views into the gradients.
    **{f"the model clears its gradients, {how}": (["p pZ pZ"] * 3, {"how": how, **CLEARS}) for how in VIEWS},
    **{
        f"behind what is dropped, {dropped}, {how}": ([f"u u u u {word}u u u u {word * 2}u u u u"], {"how": how})
        for dropped, word in DROPPED.items() for how in VIEWS
    },
    # No GradScaler has looked at its sum.
    **{f"an overflow, {s}": (["x uF u uF"], {"engine": "fsdp2", "sync": s, **OVERFLOWS}) for s in SYNCS},
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
@on_ranks()
def test_windows_that_are_dropped_flushed_or_broken_off_leave_nothing_behind(rank, script):
    """Of which DDP may have prepared to reduce some, or reduced them."""
    epochs, options = SCRIPTS[script]
    follow(rank, epochs, **options)


def follow(rank, epochs, *, sizes=FOUR, engine="ddp", how=None, steps=2, sync="window", in_batches=False, scaled=False):
    """The oracle makes the updates of windows that are full, flushed, or end an epoch of batches(), and finite."""
    oracle, (used, optimizer), ranks = Oracle(network()), wrap(engine, network(), steps, how, sync=sync), data(sizes)
    scaler, window, count = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None, [], len(sizes[rank])

    def close():
        made = bool(window) and all(letter != "x" for letter, _ in window)
        if made:
            oracle.update(concatenated([rows for _, every in window for rows in every]))
        window.clear()
        return made

    for words in map(str.split, epochs):
        for i, rows in enumerate(optimizer.batches(ranks[rank]) if in_batches else itertools.cycle(ranks[rank])):
            letter = words[i][0]
            if letter in "ux":
                m = (lambda x: used(x) * float("inf")) if (letter, rank) == ("x", 1) else used
                train_on(m, optimizer, [rows], "plain" if in_batches else "weighed", scaler)
            else:
                loss = loss_of(used, rows)
            if letter in "pb":
                loss.backward()
            if letter == "p":
                optimizer.step()
            if letter in "uxp":
                window.append((letter, [own[i % count] for own in ranks]))
            if len(window) == steps or (in_batches and i + 1 == count):
                close()
            if "F" in words[i]:
                assert optimizer.flush() == close()
            if "D" in words[i]:
                optimizer.discard()
                window.clear()
            if "Z" in words[i]:
                used.zero_grad()
            if i + 1 == len(words) and not (in_batches and i + 1 == count):
                break
        window.clear()
    oracle.check(used)
    assert optimizer.updates == oracle.updates


FREEZING = {"yyyn": "", "yyny": "", "ynny": "", "nyyy": "", "nnny": "does not reduce"}
"""What is said where the middle layer is trained when DDP wraps it, when the optimizer is built, in two epochs."""


@pytest.mark.parametrize("trained", FREEZING)
@pytest.mark.parametrize("way", ["weighed", "TrainStep"])
@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused_parameters"])
@on_ranks()
def test_what_is_frozen_or_unfrozen_after_ddp_has_wrapped_it_is_exact_or_named(rank, trained, way, unused):
    said = "" if unused else FREEZING[trained]
    if trained == "yyyn" and way == "weighed" and not unused:  # the second window is reduced in the backward pass
        said = "has not reduced"
    when_wrapped, when_built, *epochs = [letter == "y" for letter in trained]
    model = Fragile()
    oracle = Oracle(model)
    model.layers[1].requires_grad_(when_wrapped)
    replica = DistributedDataParallel(model, find_unused_parameters=unused)
    model.layers[1].requires_grad_(when_built)
    split = way == "TrainStep"
    optimizer = step_of(replica, micro_batch_size=2) if split else Optimizer(sgd(replica), 2, model=replica)
    for epoch, trains in enumerate(epochs):
        model.layers[1].requires_grad_(trains)
        oracle.model.layers[1].requires_grad_(trains)
        ranks, before = data([[2, 2]] * 2, epoch), [p.detach().clone() for p in model.parameters()]
        try:
            if split:
                optimizer(*concatenated(ranks[rank]))
            else:
                train_on(replica, optimizer, ranks[rank], way)
        except WindowError as error:
            assert said and said in str(error)  # noqa: PT017, PT018  # of a rank
            assert relative_error(model.parameters(), before) == 0.0
            return
        oracle.update(concatenated([rows for own in ranks for rows in own]))
    assert not said
    oracle.check(model)


class Drifts(nn.Module):
    """Moves a buffer in each pass that its outputs depend on, and one that belongs to the rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("phase", torch.zeros((), dtype=torch.float64))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.phase += 0.3
        self.rows += len(x)
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.ones((), dtype=torch.float64))
        return x * (self.phase + self.made).cos()


@pytest.mark.parametrize(("sizes", "passes"), [([[4] * 2, [4] * 7], [7, 14]), ([[4] * 5, [4] * 3], [5, 10])])
@on_ranks()
def test_buffers_are_those_of_a_rank_that_still_had_micro_batches(rank, sizes, passes):
    model = network().insert(1, Drifts())
    replica, optimizer = wrap("ddp", model)
    for epoch in range(2):
        train_on(replica, optimizer, optimizer.batches(data(sizes, epoch)[rank]))
        assert round(model[1].phase.item() / 0.3) == passes[epoch]


@pytest.mark.parametrize("way", ["broadcast", "each its own", "sharded"])
@on_ranks()
def test_a_rank_without_rows_has_the_buffers_of_one_that_has_some(rank, way):
    model = network().insert(1, Drifts())
    oracle = Oracle(model)
    used = shard(model) if way == "sharded" else DistributedDataParallel(model, broadcast_buffers=way == "broadcast")
    check_steps(rank, step_of(used, micro_batch_size=3), oracle, data([[4, 0, 7, 3], [5, 6, 0, 2]]))
    assert model[1].phase == oracle.model[1].phase
    assert model[1].made == oracle.model[1].made


# The noise scale: what one process finds that sees the same windows.

NOISY_STEPS = 3
NOISY = [[4, 2, 5, 1, 3, 7, 2, 6, 4], [3, 3, 1, 6, 2, 4, 5, 5, 2]]
EXACT = 1e-11
"""The estimates are differences of squared norms, each as exact as a gradient: 1e-12."""


def told(scale):
    return scale.value, *scale.interval, scale.batch_size


def noise_of(rank, engine, scaled):
    """The noise scale of this rank is that of one process whose windows begin with this rank's first micro-batch."""
    ranks, model = data(NOISY), network()
    alone = Optimizer(sgd(model), steps=2 * NOISY_STEPS, model=model, noise_scale=True)
    order = [rank, 1 - rank]
    rows = [b for w in range(3) for r in order for b in ranks[r][NOISY_STEPS * w : NOISY_STEPS * (w + 1)]]
    train_on(model, alone, alone.batches(rows))
    model = spread(engine, network())
    optimizer = Optimizer(sgd(model), steps=NOISY_STEPS, model=model, noise_scale=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
    train_on(model, optimizer, optimizer.batches(ranks[rank]), scaler=scaler)
    assert told(optimizer.noise_scale) == pytest.approx(told(alone.noise_scale), rel=EXACT)
    return told(optimizer.noise_scale)


@pytest.mark.parametrize(
    ("engine", "scaled"), slowly([("ddp", True), ("fsdp2", False)], [("ddp", False), ("fsdp2", True)])
)
def test_each_rank_finds_what_one_process_finds_whose_windows_begin_with_its_micro_batch(ranks, engine, scaled):
    first, second = ranks.run(noise_of, engine, scaled)
    assert first != pytest.approx(second, rel=EXACT)  # each is an estimate of its own


@pytest.mark.parametrize("engine", slowly(["fsdp2"], ["ddp"]))
@on_ranks()
def test_train_step_finds_what_one_process_finds(rank, engine):
    batches, found = data([[12, 8, 16], [10, 7, 15]]), []  # as many micro-batches on each, the first of 4 rows
    for together in (True, False):
        step = step_of(spread(engine, network()) if together else network(), noise_scale=True)
        for own, other in zip(batches[rank], batches[1 - rank], strict=True):
            step(*(own if together else concatenated([own, other])))
        found.append(told(step.noise_scale))
    assert found[0] == pytest.approx(found[1], rel=EXACT)
