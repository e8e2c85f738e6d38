"""Accelerate on two real processes: a window's update is that of all ranks' rows."""

import itertools
import shutil

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState

from gradaccum.integrations.accelerate import prepare_optimizer
from gradaccum.torch.optim import Optimizer
from tests.integrations.distributed.problems import batches, of_two
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.distributed.problems import error_of, slowly, whole
from tests.torch.distributed.processes import on_ranks
from tests.torch.problems import mse, network, sgd


def reset(rank):
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def leave_no_state(ranks):
    """An Accelerator's state is its process's."""
    yield
    if ranks.alive:
        ranks.run(reset)


def accelerator(rank, fsdp=0):
    """`fsdp`: as one with that FSDP plugin is on GPUs: on CPUs Accelerate takes DistributedDataParallel instead."""
    reset(rank)
    GradientState._reset_state()
    of_two(rank)
    one = Accelerator(cpu=True)
    if fsdp:
        use_fsdp(fsdp)
    return one


def use_fsdp(version):
    reshards = version == 2 or "full_shard"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, reshard_after_forward=reshards, cpu_ram_efficient_loading=False
    )
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def prepared(rank, steps, sharded=False):
    one, model = accelerator(rank, 2 * sharded), network(dtype=torch.float64)
    inner = sgd(model.parameters())
    model, inner = one.prepare(model, inner) if sharded else (one.prepare(model), inner)
    optimizer = prepare_optimizer(one, inner, steps)
    assert one.num_processes == 2
    assert one._optimizers[-1:] == [optimizer]
    return one, model, optimizer


def train(one, model, optimizer, rows, clip=None, value=None):
    for batch in rows:
        one.backward(mse(model, *batch))
        if clip is not None:
            one.clip_grad_norm_(model.parameters(), clip)
        if value is not None:
            one.clip_grad_value_(model.parameters(), clip_value=torch.tensor(value, dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()


QUICK = [((4, 2), 2, "norm"), ((3, 2), 2, "norm"), ((4, 3), 2, "norm"), ((5, 5), 2, "norm"), ((5, 5), 2, "norm shards")]
QUICK += [(counts, 1, "value hook") for counts in ((4, 2), (3, 2), (4, 3))]
SLOWLY = [((5, 5), steps, what) for steps in (1, 2, 3) for what in ("", "norm") if (steps, what) != (2, "norm")]
SLOWLY += [((5, 5), 2, "shards"), *((c, 3, what) for c in ((4, 2), (3, 2), (4, 3)) for what in ("norm hook", "value"))]


@pytest.mark.parametrize(("counts", "steps", "what"), slowly(QUICK, SLOWLY))
@on_ranks()
def test_ragged_and_short_windows_make_the_update_of_all_ranks_rows(rank, counts, steps, what):
    """What the loop's body asks for, clipping, and schedules in a hook, is done on ranks whose loop is over, too."""
    one, model, optimizer = prepared(rank, steps, "shards" in what)
    of_ranks = [batches(r)[:count] for r, count in enumerate(counts)]
    clip, value = 0.05 if "norm" in what else None, 0.01 if "value" in what else None
    if "hook" in what:
        schedule = one.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8))
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    for _ in range(2):
        train(one, model, optimizer, optimizer.batches(of_ranks[rank]), clip, value)
    plain = network(dtype=torch.float64)
    inner = sgd(plain.parameters())
    decay = 0.8**2 if "hook" in what else 1.0  # a prepared schedule steps as many times as there are processes
    rates = torch.optim.lr_scheduler.StepLR(inner, 1, decay)
    if value:
        inner.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(plain.parameters(), value))
    windows = [[batch for mine in of_ranks for batch in mine[i : i + steps]] for i in range(0, max(counts), steps)]
    large = [tuple(torch.cat(parts) for parts in zip(*window, strict=True)) for window in windows]
    torch_updates(plain, inner, large * 2, mse, clip_grad_norm=clip, after_update=rates.step)
    assert relative_error(whole(model), plain.parameters()) <= FLOAT64
    assert optimizer.param_groups[0]["lr"] == pytest.approx(inner.param_groups[0]["lr"], rel=FLOAT64, abs=0)
    assert optimizer.updates == 2 * -(-max(counts) // steps)


CLIPS = "clipping is accelerator.clip_grad_norm_(parameters [0, 1, 2, 3], [0.1], {}) on rank 0"
DIFFERENT = "Ranks have different hyperparameters: lr is"


@pytest.mark.parametrize(
    ("what", "message", "updates"),
    [
        ("clip", f"Ranks have different hyperparameters: {CLIPS}, accelerator.clip_grad_norm_(", 0),
        ("no batch", f"{CLIPS}, none on rank 1", 0),
        ("schedule", f"{DIFFERENT} 0.0125 on rank 0, 0.025 on rank 1", 3),
        ("prepared schedule", f"{DIFFERENT} 0.0015625 on rank 0, 0.00625 on rank 1", 3),
        ("empty", "The loader yielded no batch. Received: loader of type list", 0),
    ],
)
@on_ranks()
def test_ranks_whose_loops_ask_for_different_things_are_refused_by_name(rank, what, message, updates):
    one, model, optimizer = prepared(rank, 1)
    if "schedule" in what:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        schedule = one.prepare(schedule) if "prepared" in what else schedule
    clip, count = 0.1 + rank if what in ("clip", "no batch") else None, {"empty": 0, "no batch": 3 * (rank == 0)}

    def run():
        for _ in range(2):
            for batch in optimizer.batches(batches(rank)[: count.get(what, 3 - rank)]):
                train(one, model, optimizer, [batch], clip)
                if "schedule" in what and optimizer.updated:
                    schedule.step()

    said = error_of(run)
    assert said.startswith(("ValueError", "WindowError"))
    assert message in said
    assert optimizer.updates == updates


@on_ranks()
def test_in_batches_accelerate_knows_of_the_batch_in_use_and_a_plain_loop_closes_its_last_window(rank):
    """`batches()` was one ahead: some rows didn't come out of gather_for_metrics."""
    x, y = (torch.cat(parts) for parts in zip(*batches(0)))
    data, gathered, ends = torch.utils.data.TensorDataset(torch.arange(len(x)), x, y), [], []
    one, model, optimizer = prepared(rank, 2)
    loop = optimizer.batches(loader := one.prepare(torch.utils.data.DataLoader(data, batch_size=3)))
    assert len(loop) == len(loader)
    for rows, *batch in itertools.chain(loop, loop):
        ends.append(one.gradient_state.end_of_dataloader)
        optimizer.backward(0 * mse(model, *batch))
        gathered += one.gather_for_metrics(rows).tolist()
        optimizer.step()
        optimizer.zero_grad()
    assert not one.gradient_state.in_dataloader
    assert ends == ([False] * (len(loader) - 1) + [True]) * 2
    assert sorted(gathered) == sorted([*range(len(x))] * 2)
    assert optimizer.updates == 2 * -(-len(loader) // 2)
    one, model, optimizer = prepared(rank, 4)
    loader = one.prepare(torch.utils.data.DataLoader(data, batch_size=3))
    train(one, model, optimizer, (batch for _, *batch in loader))
    assert (optimizer.updates, optimizer.micro_batches) == (-(-len(loader) // 4), 0)
    assert len(x) % 6
    assert len(loader) % 4


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("after", slowly([4], [1, 2, 3, 8]))
@on_ranks()
def test_files_hold_each_ranks_part_of_the_open_window_and_go_on_there(rank, tmp_path, after, sharded):
    """Bit for bit, if each rank saves its own."""
    found, rows = [], [*batches(rank), *batches(rank)]
    for resumed in (False, True):
        one, model, optimizer = prepared(rank, 3, sharded)
        if resumed:  # other parameters, and no momentum
            for parameter in model.parameters():
                parameter.data.zero_()
            one.load_state(str(tmp_path))
        else:
            train(one, model, optimizer, rows[:after])
            one.save_state(str(tmp_path))
        assert optimizer.micro_batches == after % 3
        train(one, model, optimizer, rows[after:])
        optimizer.flush()
        found.append(whole(model))
        torch.distributed.barrier()
    assert relative_error(*found) <= (FLOAT64 if sharded else 0)


def two_prepared(rank):
    one = accelerator(rank)
    models = [one.prepare(network(dtype=torch.float64)) for _ in range(2)]
    return one, models, [prepare_optimizer(one, sgd(model.parameters()), 3) for model in models]


SAVED = {"one": (0, 1), "another": (0, 1), "by the main process alone": (0,)}
"""Runs, and the ranks that save in them."""
PART = "optimizer_{}_window_1.bin".format
UNUSABLE = {
    # What is said of the second rank's parts, whose files they stand beside, and which they are.
    "as saved": ("", "one", [("one", 0), ("one", 1)]),
    "missing": (f"{PART(0)} is missing. Call accelerator.save_state() on all", "by the main process alone", []),
    "of a save before one by the main process alone": (
        f"{PART(0)} is from another save. Call accelerator.save_state() on all",
        *("by the main process alone", [("one", 0), ("one", 1)]),
    ),
    "cut off": (f"{PART(1)} is incomplete (", "one", [("one", 0), ("one", 1)]),
    "exchanged": (f"{PART(0)} is from another save.", "one", [("one", 1), ("one", 0)]),
    "of another run": (f"{PART(1)} is from another save.", "one", [("one", 0), ("another", 1)]),
}


@on_ranks()
def test_parts_that_are_missing_or_cut_off_or_another_optimizers_or_saves_are_refused_on_all(rank, tmp_path):
    """Two optimizers are in open windows."""
    for run, on in SAVED.items():
        one, models, optimizers = two_prepared(rank)
        for model, optimizer in zip(models, optimizers):
            train(one, model, optimizer, batches(rank)[:1])
        if rank in on:
            one.save_state(str(tmp_path / run))
        torch.distributed.barrier()
    for how, (says, run, parts) in UNUSABLE.items():
        files = tmp_path / how
        if rank == 0:
            shutil.copytree(tmp_path / run, files)
            for i, (source, part) in enumerate(parts):
                shutil.copy(tmp_path / source / PART(part), files / PART(i))
            if how == "cut off":
                (files / PART(1)).write_bytes((files / PART(1)).read_bytes()[:-100])
        torch.distributed.barrier()
        one, models, optimizers = two_prepared(rank)
        said = error_of(lambda one=one, files=files: one.load_state(str(files)))
        assert says in said
        assert bool(says) == said.startswith("WindowError")
        assert not says or f"a process's part of it can't be used: {files}" in said
        assert says or (said, [optimizer.micro_batches for optimizer in optimizers]) == ("", [1, 1])


@pytest.mark.parametrize(
    ("how", "fsdp", "message"),
    [
        ("too early", 0, "in no model that this Accelerator has prepared. Prepare the model first"),
        ("wrapped", 2, "belong to a sharded model (fully_shard) that the optimizer does not know"),
        ("alone", 2, "in no model that this Accelerator has sharded. FSDP2 replaces parameters, so prepare both"),
        ("FSDP1", 1, "Use FSDP2: FullyShardedDataParallelPlugin(fsdp_version=2)"),
    ],
)
@on_ranks()
def test_other_ways_are_refused_by_name(rank, how, fsdp, message):
    one, model, other = accelerator(rank, fsdp), network(dtype=torch.float64), network(dtype=torch.float64)
    inner = sgd(model.parameters())

    def run():
        if how == "wrapped":
            train(one, *one.prepare(model, Optimizer(inner, 2)), batches(rank)[:2])
        elif how == "alone":
            one.prepare(model, inner)
            prepare_optimizer(one, sgd(other.parameters()), 2)
        else:
            prepare_optimizer(one, inner, 2)

    said = error_of(run)
    assert said.startswith("ValueError")
    assert message in said
