"""Two ranks (gloo, on this machine): our windows against the hand-written no_sync loop, Accelerate and plain DDP.

A window of ours makes one collective more than the loop by hand: a message of 24 numbers, which says that this rank
comes to the reduction, and what it weighs. "by hand, with a message" does the same work without the rest of us, so it
is the floor of such a design on this machine. "by hand, again" is the rival once more, in memory of its own: what
its row differs from 1 is noise.
"""

import contextlib
import functools
import gc
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
        elif way == "message":
            self.message = Message(self.model)
        elif way == "Accelerate":
            self.accelerator = _accelerator()
            self.optimizer = self.accelerator.prepare(self.optimizer)

    rows = 0
    message: Any = None

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
        for batch in batches:
            self.step(*batch)

    def accelerate(self, batches: list[Any]) -> None:
        for x, y in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def no_sync(self, batches: list[Any], steps: int = STEPS) -> None:
        for i, (x, y) in enumerate(batches):
            last = (i + 1) % steps == 0
            if self.message is not None:
                self.message.due = last
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


class Message:
    """Exchanged during a backward pass: sent when the first gradient is there, read before the first reduction."""

    group: Any = None

    def __init__(self, model: nn.Module) -> None:
        self.due, self._sent = False, (None, None)
        Message.group = Message.group or dist.new_group(backend="gloo")
        parameters = [*model.parameters()]
        parameters[-1].register_post_accumulate_grad_hook(lambda _: self._send())
        parameters[2].register_post_accumulate_grad_hook(lambda _: self._read())  # it fills DDP's first bucket

    def _send(self) -> None:
        if self.due:
            mine, received = torch.zeros(24, dtype=torch.float64), torch.empty(RANKS, 24, dtype=torch.float64)
            self._sent = self.group.allgather([[*received]], [mine]), received

    def _read(self) -> None:
        if self.due:
            work, received = self._sent
            work.wait()
            received.tolist()
            self.due = False


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


WAYS: dict[str, tuple[str, Callable[..., None]]] = {
    "gradaccum, plain loop": ("wrapped", Contender.wrapped),
    "gradaccum, batches()": ("wrapped", Contender.through_batches),
    "TrainStep": ("TrainStep", Contender.split),
    "Accelerate": ("Accelerate", Contender.accelerate),
    RIVAL: ("by hand", Contender.no_sync),
    "by hand, again": ("by hand", Contender.no_sync),
    "by hand, with a message": ("message", Contender.no_sync),
    "DDP, every micro-batch": ("by hand", Contender.every_micro_batch),
}
BUILDS = 3
"""How often all of them are built anew: of small networks, where their memory lies decides some per cent."""


def measured(rank: int, rounds: int, windows: int, rows: int) -> list[tuple[str, Ratio, Ratio, list[str]]]:
    """Each contender's name, its time, its processor time, and what it sends."""
    Contender.rows = rows
    generator = torch.Generator().manual_seed(rank)
    batches: list[Any] = [
        (torch.randn(rows, 784, generator=generator), torch.randint(10, (rows,), generator=generator))
        for _ in range(STEPS * windows)
    ]
    large = [[*map(torch.cat, zip(*batches[i : i + STEPS], strict=True))] for i in range(0, len(batches), STEPS)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    shuffle, sent = random.Random(0), dict[str, list[str]]()
    for _ in range(BUILDS):
        contenders = {name: Contender(way) for name, (way, _) in WAYS.items()}
        trains = {
            name: functools.partial(train, contenders[name], large if train is Contender.split else batches)
            for name, (_, train) in WAYS.items()
        }
        for train in trains.values():
            for _ in range(math.ceil(WARM_UP / windows)):
                train()
        for _ in range(math.ceil(rounds / BUILDS)):
            for name in shuffle.sample(list(WAYS), len(WAYS)):
                contenders[name].begin()
                dist.barrier()
                start = time.perf_counter(), time.process_time()
                trains[name]()
                used = time.process_time() - start[1]
                dist.barrier()
                times[name].append((time.perf_counter() - start[0], used))
        sent = {name: contender.sent(windows) for name, contender in contenders.items()}
        del contenders, trains
        gc.collect()

    def ratio(name: str, clock: int) -> Ratio:
        return ratio_of([mine[clock] / theirs[clock] for mine, theirs in zip(times[name], times[RIVAL], strict=True)])

    return [(name, ratio(name, 0), ratio(name, 1), sent[name]) for name in WAYS]


def main() -> None:
    options = arguments(__doc__)
    rounds, windows = (24, 3) if options.quick else (45, 4)
    sizes = ROWS[:1] if options.quick else ROWS
    found = [on_ranks(measured, RANKS, rounds, windows, rows) for rows in sizes]
    for rows, run in zip(sizes, found, strict=True):
        recorded({name: wall for name, wall, *_ in run}, RIVAL, rounds, f"2 ranks, {rows} rows a micro-batch")
    lines = [
        [name, *(ratio for run in found for ratio in run[i][1:3]), *sent] for i, (name, *_, sent) in enumerate(found[0])
    ]
    text = (
        f"{RANKS} ranks over gloo, windows of {STEPS} micro-batches, a 784-512-512-10 network. Relative to the "
        f"hand-written loop: time, and what all threads of a rank compute; medians of {rounds} rounds of {windows} "
        f"windows after {WARM_UP}. Sent, per window: gradient bytes that each rank gives to its reductions, of which "
        "there is one for each of DDP's buckets; and messages (with `batches()`, two more per epoch). The loop by hand "
        "with a message exchanges one of the same size at the same places, and does nothing else of ours: the floor. "
        "What the same loop takes once more shows the noise.\n\n"
    )
    head = ["", *(f"{what}, {rows} rows" for rows in sizes for what in ("time", "processor"))]
    publish(
        "distributed",
        "Two ranks",
        text + table([*head, "sent", "reductions", "messages"], lines),
        ["torch", "accelerate"],
        options,
        ours=["gradaccum, plain loop", "gradaccum, batches()", "TrainStep"],
    )


if __name__ == "__main__":
    main()
