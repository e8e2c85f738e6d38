"""Checkpoints of open windows over several ranks, which go on in new processes, and on other numbers of ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from gradaccum.errors import WindowError
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import (
    SYNCS,
    Oracle,
    concatenated,
    data,
    lines_of,
    network,
    slowly,
    train_on,
    whole,
    wrap,
)
from tests.torch.distributed.processes import LIMIT, fresh_process, new_port, on_ranks


def load(model, optimizer, states, **options):
    model_state, state, given = *states, StateDictOptions(**options)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state, options=given)


UNEVEN, EVEN = [[4, 3, 5, 1, 2], [2, 5, 1, 4]], [[4, 3, 5, 1, 2], [2, 5, 1, 4, 2]]
UNFINISHED = [[4, 3, 5, 1, 2, 6], [2, 5, 1, 4, 3, 2]]
"""Rows of two ranks: a window of three micro-batches, and another one."""
SHARDS = {"engine": "fsdp2", "steps": 3}
RESUMED = {
    # Rows, the model and the optimizer, micro-batches before it is saved, and how they are weighed.
    **{
        name: (UNEVEN, {"engine": "ddp", "steps": 3, "how": {name: True}}, 2, "weighed")
        for name in ("gradient_as_bucket_view", "find_unused_parameters")
    },
    "shards": (EVEN, SHARDS, 2, "weighed"),
    "shards, micro_batch": (EVEN, {**SHARDS, "sync": "micro_batch"}, 2, "weighed"),
    "shards under a GradScaler, saved unscaled": (UNFINISHED, SHARDS, 2, "scaled"),
}


@pytest.mark.parametrize("how", RESUMED)
@on_ranks()
def test_every_rank_resumes_its_part_of_an_open_window(rank, how):
    """A new model and optimizer go on from there; where ranks have as many batches, the old ones, too."""
    sizes, options, first, way = RESUMED[how]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) if way == "scaled" else None for scale in (1024.0, 256.0)]
    ranks, oracle = data(sizes), Oracle(network(), options.get("optimizer", "sgd"))
    oracle.see(ranks, options["steps"])
    used, optimizer = wrap(model=network(), **options)
    train_on(used, optimizer, ranks[rank][:first], way, scalers[0])
    state, again = copy.deepcopy(optimizer.state_dict()), network()
    for parameter, value in zip(again.parameters(), whole(used), strict=True):
        parameter.data.copy_(value)
    if way == "weighed" and sizes is EVEN:
        train_on(used, optimizer, ranks[rank][first:], way)
        optimizer.flush()
        oracle.check(used)
    used, optimizer = wrap(model=again, **options)
    optimizer.load_state_dict(state)
    later = ranks[rank][first:]
    train_on(used, optimizer, optimizer.batches(iter(later)), way, scalers[1])
    oracle.check(used)


def states_of(model, optimizer, way):
    if way == "state_dict":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))


def save(rank, model, optimizer, folder, way="get_state_dict"):
    if way != "full":
        dcp.save(states_of(model, optimizer, way), checkpoint_id=str(folder))
        return
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(states, folder / "full.pt")


def restore(rank, model, optimizer, folder, way="get_state_dict"):
    if way == "full":  # rank 0's, of which the ranks take their shards
        received = [torch.load(folder / "full.pt", weights_only=False) if rank == 0 else None]
        dist.broadcast_object_list(received)
        load(model, optimizer, received[0], full_state_dict=True)
        return
    states = states_of(model, optimizer, way)
    dcp.load(states, checkpoint_id=str(folder))
    if way == "state_dict":
        optimizer.load_state_dict(states["optimizer"])
    else:
        load(model, optimizer, states.values(), flatten_optimizer_state_dict=way == "flat")


@pytest.mark.parametrize("micro_batches", [2, 3])
@on_ranks()
def test_a_distributed_checkpoint_of_replicas_that_loses_an_open_window_says_so(rank, tmp_path, micro_batches):
    """torch.distributed.checkpoint keeps nothing of it."""
    ranks, oracle, ends = data(EVEN), Oracle(network(), "adam"), micro_batches - micro_batches % 2
    oracle.see([[*own[:ends], *own[micro_batches:]] for own in ranks], 2)
    (replica, optimizer), (other, new) = (wrap("ddp", network(), optimizer="adam") for _ in "ab")
    train_on(replica, optimizer, ranks[rank][:micro_batches], "weighed")
    save(rank, replica, optimizer, tmp_path)
    warnings = lines_of(lambda: restore(rank, other, new, tmp_path))
    train_on(other, new, ranks[rank][micro_batches:], "weighed")
    new.flush()
    oracle.check(other)
    assert any("1 of 2 micro-batches are lost" in warning for warning in warnings) == (micro_batches == 3)


def train_inside(rank, folder, first, sync, optimizer, way, saves):
    """Train, and save after so many micro-batches; or go on from there in a new process. Returns the parameters."""
    model, wrapped = wrap("fsdp2", network(), 3, optimizer=optimizer, sync=sync)
    ranks, oracle = data(UNFINISHED * (dist.get_world_size() // 2)), Oracle(network(), optimizer)
    if saves:
        train_on(model, wrapped, ranks[rank][:first], "weighed")
        save(rank, model, wrapped, folder, way)
    else:
        restore(rank, model, wrapped, folder, way)
    assert wrapped.micro_batches == first % 3
    train_on(model, wrapped, ranks[rank][first:], "weighed")
    oracle.see(ranks, 3)
    oracle.check(model)
    return [parameter.tolist() for parameter in whole(model)]


CHECKPOINTS = [
    ("window", "adam", "get_state_dict"),
    ("window", "sgd", "flat"),
    ("window", "adam", "state_dict"),
    ("micro_batch", "sgd", "get_state_dict"),
    ("micro_batch", "adam", "flat"),
]
TWICE, HYBRID = ("ranks", "new_ranks"), ("four_ranks", "four_ranks")
IN_THE_FIRST_WINDOW, CLOSED, IN_THE_SECOND_WINDOW = 2, 3, 4
QUICK = [  # each of their values, and each place
    (TWICE, IN_THE_FIRST_WINDOW, *CHECKPOINTS[2]),
    (TWICE, IN_THE_SECOND_WINDOW, *CHECKPOINTS[3]),
    (TWICE, CLOSED, *CHECKPOINTS[4]),
    (TWICE, IN_THE_SECOND_WINDOW, "window", "adam", "full"),
]
ALL = [(TWICE, first, *one) for first in (IN_THE_FIRST_WINDOW, CLOSED, IN_THE_SECOND_WINDOW) for one in CHECKPOINTS]
ALL += [(HYBRID, IN_THE_FIRST_WINDOW, sync, "adam", "get_state_dict") for sync in SYNCS]


@pytest.mark.parametrize(
    ("processes", "first", "sync", "optimizer", "way"), slowly(QUICK, [one for one in ALL if one not in QUICK])
)
def test_a_distributed_checkpoint_of_an_open_window_goes_on_in_new_processes_bit_for_bit(
    request, tmp_path, processes, first, sync, optimizer, way
):
    saved, found = (
        request.getfixturevalue(name).run(train_inside, tmp_path, first, sync, optimizer, way, saves)
        for name, saves in zip(processes, (True, False))
    )
    assert found == saved


def loaded_elsewhere(rank, folder, steps, optimizer):
    """The first window of two ranks, two micro-batches of three each, goes on over other ranks with other rows."""
    oracle, (model, wrapped) = Oracle(network(), optimizer), wrap("fsdp2", network(), steps, optimizer=optimizer)
    restore(rank, model, wrapped, folder)
    there = data(UNFINISHED)
    here = data([[3, 4, 2, 7], [5, 1, 4, 2], [2, 2, 6, 3]][: dist.get_world_size()], epoch=1)
    oracle.update(concatenated([rows for own in there for rows in own[:2]] + [own[0] for own in here]))
    oracle.update(concatenated([rows for own in here for rows in own[1:]]))
    train_on(model, wrapped, here[rank], "weighed")
    assert wrapped.updates == 2
    oracle.check(model)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield types.SimpleNamespace(run=lambda case, *arguments: case(0, *arguments))
    dist.destroy_process_group()


ELSEWHERE = [("one_rank", "sgd", 3), ("one_rank", "adam", 3), ("one_rank", "sgd", 2)]


@pytest.mark.parametrize(
    ("there", "optimizer", "steps"), slowly(ELSEWHERE, [("three_ranks", "sgd", 3), ("three_ranks", "adam", 3)])
)
def test_an_open_window_goes_on_over_other_ranks_and_keeps_its_length(
    ranks, request, tmp_path, there, optimizer, steps
):
    ranks.run(train_inside, tmp_path, 2, "window", optimizer, "get_state_dict", True)
    longer = pytest.raises(WindowError, match="when `updated` is True")
    with contextlib.nullcontext() if steps == 3 else longer:
        request.getfixturevalue(there).run(loaded_elsewhere, tmp_path, steps, optimizer)


@on_ranks()
def test_a_state_dict_before_the_first_update_changes_nothing(rank):
    """It is no update, though torch makes the optimizer's state for it by a step."""
    (model, optimizer), (plain, other) = (wrap("fsdp2", network(), 3, optimizer="adam") for _ in "ab")
    rows = data(UNFINISHED)[rank]
    get_state_dict(model, optimizer)
    train_on(model, optimizer, rows[:1], "weighed")
    get_state_dict(model, optimizer)
    train_on(model, optimizer, rows[1:], "weighed")
    train_on(plain, other, rows, "weighed")
    assert relative_error(whole(model), whole(plain)) <= FLOAT64


@pytest.mark.parametrize("sync", SYNCS)
@on_ranks()
def test_a_restored_window_may_be_flushed_before_any_forward_pass(rank, sync):
    ranks, oracle = data([[4, 2], [3, 5]]), Oracle(network(), "adam")
    model, optimizer = wrap("fsdp2", network(), 3, optimizer="adam", sync=sync)
    train_on(model, optimizer, ranks[rank], "weighed")
    states = get_state_dict(model, optimizer)
    optimizer.discard()
    model, optimizer = wrap("fsdp2", network(), 3, optimizer="adam", sync=sync)
    load(model, optimizer, states)
    assert optimizer.flush()
    train_on(model, optimizer, ranks[rank], "weighed")
    optimizer.flush()
    for _ in range(2):
        oracle.see(ranks, 2)
    oracle.check(model)


# examples/torch/elastic.py: killed, and resumed on other numbers of ranks, it ends with the same bits.

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch" / "elastic.py"


def run_example(said, environment, arguments):
    """The example as a program, and what it prints in a file."""
    os.environ.update(environment)
    sys.argv[:] = [str(EXAMPLE), *arguments]
    with said.open("w") as sys.stdout:
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def start(checkpoint, ranks, *arguments):
    """What torchrun starts on each rank, as forks of a process that has imported PyTorch, and what each says.

    They meet in this process, as torchrun's do in its agent: at a port that nobody else can have taken.
    """
    port, found = str(new_port()), []
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port, "MASTER_ADDR": "localhost"}
        said = checkpoint.with_suffix(f".{port}.{rank}")
        line = ("--checkpoint", str(checkpoint), *arguments)
        found.append((fresh_process(run_example, said, {**agent, **place}, line), said))
    return found


def finished(process, said):
    """Its exit code, and what it has said."""
    process.join(LIMIT)
    return process.exitcode, said.read_text()


def test_a_run_that_is_killed_goes_on_with_other_numbers_of_ranks_to_the_same_bits(tmp_path):
    options = "--dataset", "digits", "--batch-size", "360", "--micro-batch-size", "60", "--save-every", "1"
    elastic, whole = tmp_path / "elastic.pt", tmp_path / "whole.pt"
    (undisturbed,) = start(whole, 1, *options)
    said = []
    for ranks, more in ((3, ("--kill-at", "3")), (2, ("--kill-at", "4")), (1, ())):
        codes, outputs = zip(*(finished(*process) for process in start(elastic, ranks, *options, *more)), strict=True)
        assert any(codes) == bool(more)
        said += outputs[0].splitlines()
    assert [line for line in said if "from" in line] == [
        "3 ranks, from update 0", "2 ranks, from update 2", "1 ranks, from update 3",
    ]  # fmt: skip
    code, output = finished(*undisturbed)
    assert code == 0
    assert said[-1] == output.splitlines()[-1]
    assert re.fullmatch("after [45] updates: SHA-256 [0-9a-f]{64}", said[-1])
    assert elastic.exists()
