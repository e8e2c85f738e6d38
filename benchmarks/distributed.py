"""Two ranks (gloo, on this machine): our windows against the hand-written no_sync loop, Accelerate and plain DDP."""

import contextlib
import functools
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import WARM_UP, Ratio, arguments, on_ranks, publish, ratio_of, recorded, table
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer

RANKS, STEPS, ROWS = 2, 4, (16, 64, 512)
RIVAL = "hand-written no_sync"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Contender:
    """A model with its way to train windows; counts what it sends."""

    def __init__(self, way: str = "by hand") -> None:
        self.model = DistributedDataParallel(network())
        self.model.register_comm_hook(self, _counted)
        self.bytes = self.reductions = 0
        self.ranks: Any = None
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if way == "wrapped":
            self.optimizer = Optimizer(self.optimizer, steps=STEPS, model=self.model)
            self.ranks = self.optimizer._windows.ranks
        elif way == "TrainStep":
            self.step = TrainStep(self.model, self.optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=self.rows)
            self.ranks = self.step.ranks
        elif way == "Accelerate":
            self.accelerator = _accelerator()
            self.optimizer = self.accelerator.prepare(self.optimizer)

    rows = 0

    def begin(self) -> None:
        """Count from here on."""
        self.bytes = self.reductions = 0
        self.messages = 0 if self.ranks is None else self.ranks.channel.line.begun

    def sent(self, windows: int) -> list[str]:
        """Bytes, reductions and messages of a window."""
        messages = 0 if self.ranks is None else self.ranks.channel.line.begun - self.messages
        counts = [f"{count / windows:.3g}" for count in (self.reductions, messages)]
        return [f"{self.bytes / windows / 2**20:.2f} MiB", *counts]

    def wrapped(self, batches: list[Any]) -> None:
        for x, y in batches:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def through_batches(self, batches: list[Any]) -> None:
        self.wrapped(self.optimizer.batches(batches))

    def split(self, batches: list[Any]) -> None:
        for i in range(0, len(batches), STEPS):
            self.step(*map(torch.cat, zip(*batches[i : i + STEPS], strict=True)))

    def accelerate(self, batches: list[Any]) -> None:
        for x, y in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def no_sync(self, batches: list[Any], steps: int = STEPS) -> None:
        for i, (x, y) in enumerate(batches):
            last = (i + 1) % steps == 0
            with contextlib.nullcontext() if last else self.model.no_sync():
                (nn.functional.cross_entropy(self.model(x), y) / steps).backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def every_micro_batch(self, batches: list[Any], steps: int = STEPS) -> None:
        for i, (x, y) in enumerate(batches):
            (nn.functional.cross_entropy(self.model(x), y) / steps).backward()
            if (i + 1) % steps == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()


# DDP reads the annotations of its hooks, which may not be postponed.
def _counted(state, bucket):  # type: ignore[no-untyped-def]
    state.bytes += bucket.buffer().numel() * bucket.buffer().element_size()
    state.reductions += 1
    work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _accelerator() -> Any:
    """Accelerate, over the process group that is there."""
    from accelerate import Accelerator

    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return Accelerator(cpu=True, gradient_accumulation_steps=STEPS)


def measured(rank: int, rounds: int, windows: int, rows: int) -> list[tuple[str, Ratio, list[str]]]:
    """Each contender's name, its time, and what it sends."""
    Contender.rows = rows
    contenders: dict[str, tuple[Contender, Callable[[list[Any]], None]]] = {}
    for name, way, train in (
        ("gradaccum, plain loop", "wrapped", Contender.wrapped),
        ("gradaccum, batches()", "wrapped", Contender.through_batches),
        ("TrainStep", "TrainStep", Contender.split),
        ("Accelerate", "Accelerate", Contender.accelerate),
        (RIVAL, "by hand", Contender.no_sync),
        ("DDP, every micro-batch", "by hand", Contender.every_micro_batch),
    ):
        contender = Contender(way)
        contenders[name] = contender, functools.partial(train, contender)
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(rows, 784, generator=generator), torch.randint(10, (rows,), generator=generator))
        for _ in range(STEPS * windows)
    ]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    shuffle, warm_up = random.Random(0), math.ceil(WARM_UP / windows)
    for round_ in range(rounds + warm_up):
        for name in shuffle.sample(list(contenders), len(contenders)):
            contender, train = contenders[name]
            contender.begin()
            dist.barrier()
            start = time.perf_counter()
            train(batches)
            dist.barrier()
            if round_ >= warm_up:
                times[name].append(time.perf_counter() - start)
    rival = times[RIVAL]
    return [
        (
            name,
            ratio_of([mine / theirs for mine, theirs in zip(times[name], rival, strict=True)]),
            contender.sent(windows),
        )
        for name, (contender, _) in contenders.items()
    ]


def main() -> None:
    options = arguments(__doc__)
    rounds, windows = (8, 5) if options.quick else (15, 10)
    sizes = ROWS[:1] if options.quick else ROWS
    found = [on_ranks(measured, RANKS, rounds, windows, rows) for rows in sizes]
    for rows, run in zip(sizes, found, strict=True):
        ratios = {name: ratio for name, ratio, _ in run}
        recorded(ratios, RIVAL, rounds, f"2 ranks, {rows} rows a micro-batch")
    lines = [[name, *(run[i][1] for run in found), *sent] for i, (name, _, sent) in enumerate(found[0])]
    text = (
        f"{RANKS} ranks over gloo, windows of {STEPS} micro-batches, a 784-512-512-10 "
        f"network. Time relative to the hand-written loop, median of {rounds} rounds of {windows} windows "
        f"after {WARM_UP}. Sent, per window: gradient bytes that each rank gives to its reductions, of which there is "
        "one for each of DDP's buckets; and messages (with `batches()`, two more per epoch).\n\n"
    )
    publish(
        "distributed",
        "Two ranks",
        text + table(["", *(f"time, {rows} rows" for rows in sizes), "sent", "reductions", "messages"], lines),
        ["torch", "accelerate"],
        options,
        ours=["gradaccum, plain loop", "gradaccum, batches()", "TrainStep"],
    )


if __name__ == "__main__":
    main()
