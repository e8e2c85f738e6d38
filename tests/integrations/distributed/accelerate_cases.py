"""What each rank does in the tests of Accelerate. Every case compares itself with one ordinary process."""

import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState

from gradaccum import WindowError
from gradaccum.integrations.accelerate import prepare_optimizer
from gradaccum.torch.optim import Optimizer
from tests.integrations.distributed.lightning_cases import batches, windows
from tests.reference import relative_error, torch_updates
from tests.torch.problems import mse, network, sgd


def accelerator(rank):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return Accelerator(cpu=True)


def reset(rank):
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(rank, steps, sharded=False):
    one = sharding(rank) if sharded else accelerator(rank)
    model = network(dtype=torch.float64)
    if sharded:
        model, inner = one.prepare(model, sgd(model.parameters()))
    else:
        model = one.prepare(model)
        inner = sgd(model.parameters())
    optimizer = prepare_optimizer(one, inner, steps)
    assert one.num_processes == 2
    assert one._optimizers[-1:] == [optimizer]
    return one, model, optimizer


def sharding(rank, version=2):
    """As an Accelerator with an FSDP plugin is on GPUs: on CPUs Accelerate takes DistributedDataParallel instead."""
    one = accelerator(rank)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, reshard_after_forward=version == 2 or "full_shard", cpu_ram_efficient_loading=False
    )
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return one


def whole(model):
    """The parameters, of a replicated model or a sharded one."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def train(rank, steps, clip=None, sharded=False):
    """Returns (error, updates)."""
    one, model, optimizer = prepared(rank, steps, sharded)
    for _ in range(2):
        for batch in optimizer.batches(batches(rank)):
            optimizer.zero_grad()
            one.backward(mse(model, *batch))
            if clip is not None:
                one.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    plain = network(dtype=torch.float64)
    torch_updates(plain, sgd(plain.parameters()), [*windows(steps)] * 2, mse, clip_grad_norm=clip)
    return relative_error(whole(model), plain.parameters()), optimizer.updates


COUNTS = ((4, 2), (3, 2), (4, 3))
"""Batches of an epoch, on each rank."""


def train_counts(rank, what, steps):
    """Epochs in which ranks have different numbers of batches. Returns pairs: error, error of the learning rate."""
    found = []
    for counts in COUNTS:
        one, model, optimizer = prepared(rank, steps)
        of_ranks = [batches(r)[:count] for r, count in enumerate(counts)]
        if "hook" in what:
            schedule = one.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8))
            optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
        for _ in range(2):
            for batch in optimizer.batches(of_ranks[rank]):
                one.backward(mse(model, *batch))
                if "norm" in what:
                    one.clip_grad_norm_(model.parameters(), 0.05)
                if "value" in what:
                    one.clip_grad_value_(model.parameters(), clip_value=torch.tensor(0.01, dtype=torch.float64))
                optimizer.step()
                optimizer.zero_grad()
        plain = network(dtype=torch.float64)
        inner = sgd(plain.parameters())
        rates = torch.optim.lr_scheduler.StepLR(inner, 1, 0.8)
        for start in [*range(0, max(counts), steps)] * 2:
            window = [batch for mine in of_ranks for batch in mine[start : start + steps]]
            inner.zero_grad()
            mse(plain, *(torch.cat(parts) for parts in zip(*window, strict=True))).backward()
            if "norm" in what:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            if "value" in what:
                torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            inner.step()
            for _ in range(2 if "hook" in what else 0):  # as many times as there are processes
                rates.step()
        rate = optimizer.param_groups[0]["lr"] / inner.param_groups[0]["lr"] - 1
        found.append((relative_error(model.module.parameters(), plain.parameters()), abs(rate)))
    return found


def apart(rank, what):
    """What is said where the ranks' loops ask for different things."""
    one, model, optimizer = prepared(rank, 1)
    if "schedule" in what:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        schedule = one.prepare(schedule) if "prepared" in what else schedule
    try:
        for _ in range(2):
            count = {"empty": 0, "no batch": 3 * (rank == 0)}.get(what, 3 - rank)
            for batch in optimizer.batches(batches(rank)[:count]):
                one.backward(mse(model, *batch))
                if what in ("clip", "no batch"):
                    one.clip_grad_norm_(model.parameters(), 0.1 + rank)
                optimizer.step()
                if "schedule" in what and optimizer.updated:
                    schedule.step()
    except (ValueError, WindowError) as error:
        return f"{error} {optimizer.updates}"


def gather(rank):
    """Returns what gather_for_metrics has, of how many rows; updates, micro-batches and open ones of a plain loop."""
    one, model, optimizer = prepared(rank, 2)
    x, y = (torch.cat(parts) for parts in zip(*batches(0)))
    data = torch.utils.data.TensorDataset(torch.arange(len(x)), x, y)
    loader = one.prepare(torch.utils.data.DataLoader(data, batch_size=3))
    gathered = []
    for rows, *batch in optimizer.batches(loader):
        optimizer.backward(0 * mse(model, *batch))
        gathered += one.gather_for_metrics(rows).tolist()
        optimizer.step()
        optimizer.zero_grad()
    one, model, optimizer = prepared(rank, 4)
    loader = one.prepare(torch.utils.data.DataLoader(data, batch_size=3))
    for _, *batch in loader:
        one.backward(mse(model, *batch))
        optimizer.step()
        optimizer.zero_grad()
    return sorted(gathered), len(x), optimizer.updates, len(loader), optimizer.micro_batches


def save(rank, folder, after, sharded=False, on=(0, 1), again=None):
    """Save after so many micro-batches, and go on in new objects. Returns (difference, how many are open there).

    Args:
        rank: This one.
        folder: For the checkpoint.
        after: Micro-batches before it.
        sharded: Whether the model is.
        on: The ranks that save.
        again: Micro-batches before the first rank saves once more, alone.
    """
    opened, ends = [], []
    for resumed in (False, True):
        one, model, optimizer = prepared(rank, 3, sharded)
        if resumed:  # other parameters, and no momentum
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            try:
                one.load_state(folder)
            except WindowError as error:
                return str(error)
            if len(on) == 1 or again is not None:
                return ""
            opened.append(optimizer.micro_batches)
        for index, batch in enumerate([*batches(rank), *batches(rank)][after if resumed else 0 :]):
            one.backward(mse(model, *batch))
            optimizer.step()
            optimizer.zero_grad()
            if not resumed and ((index == after - 1 and rank in on) or (index + 1 == again and rank == 0)):
                one.save_state(folder)
                opened.append(optimizer.micro_batches)
        optimizer.flush()
        ends.append(whole(model))
        torch.distributed.barrier()
    return relative_error(ends[1], ends[0]), opened


def load_other_parts(rank, folder):
    """Two optimizers in open windows, saved in each of two runs; then load them with the second rank's parts changed.

    Returns what is said, by what was done to the parts.
    """
    saved, said = (Path(folder) / name for name in ("one", "two")), {}
    part = "optimizer_{}_window_1.bin".format
    for each in saved:
        one, models, optimizers = _two_prepared(rank)
        for model, optimizer in zip(models, optimizers):
            one.backward(mse(model, *batches(rank)[0]))
            optimizer.step()
        one.save_state(str(each))
    torch.distributed.barrier()
    for how in ("cut off", "exchanged", "of another run", "as saved"):
        files = Path(folder) / how
        if rank == 0:
            shutil.copytree(Path(folder) / "one", files)
            if how == "cut off":
                (files / part(1)).write_bytes((files / part(1)).read_bytes()[:-100])
            elif how == "exchanged":
                for mine, other in ((0, 1), (1, 0)):
                    shutil.copy(Path(folder) / "one" / part(mine), files / part(other))
            elif how == "of another run":
                shutil.copy(Path(folder) / "two" / part(1), files)
        torch.distributed.barrier()
        one, models, optimizers = _two_prepared(rank)
        try:
            one.load_state(str(files))
            said[how] = [optimizer.micro_batches for optimizer in optimizers]
        except WindowError as error:
            said[how] = str(error)
    return said


def _two_prepared(rank):
    one = accelerator(rank)
    models = [one.prepare(network(dtype=torch.float64)) for _ in range(2)]
    return one, models, [prepare_optimizer(one, sgd(model.parameters()), 3) for model in models]


def refused(rank, how):
    """What is said."""
    one = accelerator(rank) if how == "too early" else sharding(rank, 1 if how == "FSDP1" else 2)
    model = network(dtype=torch.float64)
    inner = sgd(model.parameters())
    try:
        if how == "wrapped":
            model, inner = one.prepare(model, Optimizer(inner, 2))
            for batch in batches(rank)[:2]:
                one.backward(mse(model, *batch))
                inner.step()
        elif how == "alone":
            other = network(dtype=torch.float64)
            one.prepare(model, inner)
            prepare_optimizer(one, sgd(other.parameters()), 2)
        else:
            prepare_optimizer(one, inner, 2)
    except ValueError as error:
        return str(error)
