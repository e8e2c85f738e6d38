"""Two ranks (gloo, on this machine): our windows against the hand-written no_sync loop, Accelerate and plain DDP.

A window of ours makes one exchange more than the loop by hand: a message, which says that this rank comes to the
reduction, and what it weighs. "by hand, with a message" does the same work without the rest of us, so it
is the floor of such a design on this machine. "by hand, again" is the rival once more, in memory of its own: what
its row differs from 1 is noise.

Each window is timed by itself. A contender's turn is a few windows, right before or right after as many of the rival's,
and what counts is the median over many such pairs of the ratio of their medians: what else the machine does changes
slowly. Windows 1, 2, 4, 8, ... are not among them: those are timed while contenders warm up.
"""

import contextlib
import gc
import itertools
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Ratio, arguments, on_ranks, publish, ratio_of, recorded, table
from gradaccum.torch import TrainStep
from gradaccum.torch.distributed import Channel
from gradaccum.torch.optim import Optimizer

RANKS, STEPS = 2, 4
WARM_UP, TURN, PAIRS = 20, 6, 4
"""Windows before the first turn; windows of a turn, of which the first finds another contender's memory in the caches,
and is not counted; pairs of turns of each contender, before all are built anew."""
SIZES = {16: 14, 64: 5}
"""By rows of a micro-batch: how often all contenders are built, in an order that changes, as where their memory lies
decides some per cent of small networks' time."""
RIVAL = "hand-written no_sync"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Contender:
    """A model with its way to train windows."""

    def __init__(self, way: str = "by hand") -> None:
        self.model = DistributedDataParallel(network())
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if way == "wrapped":
            self.optimizer = Optimizer(self.optimizer, steps=STEPS, model=self.model)
        elif way == "TrainStep":
            self.step = TrainStep(self.model, self.optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=self.rows)
        elif way == "message":
            self.message = Message(self.model)
        elif way == "Accelerate":
            self.accelerator = _accelerator()
            self.optimizer = self.accelerator.prepare(self.optimizer)

    rows = 0
    message: Any = None

    def wrapped(self, batches: Iterable[Any]) -> None:
        for x, y in batches:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def through_batches(self, batches: Iterable[Any]) -> None:
        self.wrapped(self.optimizer.batches(batches))

    def split(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self.step(*batch)

    def accelerate(self, batches: Iterable[Any]) -> None:
        for x, y in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def no_sync(self, batches: Iterable[Any]) -> None:
        for i, (x, y) in enumerate(batches):
            last = (i + 1) % STEPS == 0
            if self.message is not None:
                self.message.due = last
            with contextlib.nullcontext() if last else self.model.no_sync():
                (nn.functional.cross_entropy(self.model(x), y) / STEPS).backward()
            if last:
                if self.message is not None:
                    self.message.read()
                self.optimizer.step()
                self.optimizer.zero_grad()


class Message:
    """Exchanged during a backward pass: sent when the first gradient is there, read before the update."""

    def __init__(self, model: nn.Module) -> None:
        self._sent: Any = None
        self.due, self._channel = False, Channel(dist.group.WORLD)
        [*model.parameters()][-1].register_post_accumulate_grad_hook(lambda _: self._send())

    def _send(self) -> None:
        if self.due:
            self._sent = self._channel.send(0.0)

    def read(self) -> None:
        self._channel.receive(self._sent)
        self.due = False


# DDP reads the annotations of its hooks, which may not be postponed.


def _accelerator() -> Any:
    """Accelerate, over the process group that is there."""
    from accelerate import Accelerator

    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return Accelerator(cpu=True, gradient_accumulation_steps=STEPS)


OURS = "gradaccum, plain loop", "gradaccum, batches()", "TrainStep"
WAYS: dict[str, tuple[str, Callable[..., None]]] = {
    "gradaccum, plain loop": ("wrapped", Contender.wrapped),
    "gradaccum, batches()": ("wrapped", Contender.through_batches),
    "TrainStep": ("TrainStep", Contender.split),
    "Accelerate": ("Accelerate", Contender.accelerate),
    RIVAL: ("by hand", Contender.no_sync),
    "by hand, again": ("by hand", Contender.no_sync),
    "by hand, with a message": ("message", Contender.no_sync),
}


class Timed:
    """A contender, and a loader of the same batches for it, with a clock where a window's first batch is fetched."""

    def __init__(self, way: str, train: Callable[..., None], batches: list[Any]) -> None:
        self.contender, self._train, self._batches = Contender(way), train, batches
        self._every = 1 if train is Contender.split else STEPS
        self._before, self._windows, self._stamps = 0, 0, list[float]()

    def __iter__(self) -> Iterator[Any]:
        for i in range(self._windows * self._every):
            if i % self._every == 0:
                self._stamps.append(time.perf_counter())
            yield self._batches[i % len(self._batches)]
        self._stamps.append(time.perf_counter())

    def run(self, windows: int) -> dict[int, float]:
        """Seconds of each window of an epoch, by its number."""
        self._windows, self._stamps = windows, []
        dist.barrier()
        self._train(self.contender, self)
        first, self._before = self._before + 1, self._before + windows
        return dict(enumerate((after - before for before, after in itertools.pairwise(self._stamps)), first))

    def turn(self) -> float:
        """Median seconds of an ordinary window."""
        _, *others = self.run(TURN).items()
        return statistics.median(seconds for number, seconds in others if number & (number - 1))


Found = dict[str, tuple[Ratio, Ratio]]
"""By contender: the time of its ordinary windows, and of those that look."""


def measured(rank: int, rows: int, builds: int) -> Found:
    generator = torch.Generator().manual_seed(rank)
    batches: list[Any] = [
        (torch.randn(rows, 784, generator=generator), torch.randint(10, (rows,), generator=generator))
        for _ in range(4 * STEPS)
    ]
    large = [[*map(torch.cat, zip(*batches[i : i + STEPS], strict=True))] for i in range(0, len(batches), STEPS)]
    Contender.rows = rows
    shuffle, ordinary, looking = (
        random.Random(0),
        defaultdict[str, list[float]](list),
        defaultdict[str, list[float]](list),
    )
    shuffle, others = random.Random(0), [name for name in WAYS if name != RIVAL]
    for _ in range(builds):
        timed = {}
        for name in shuffle.sample([*WAYS], len(WAYS)):
            way, train = WAYS[name]
            timed[name] = Timed(way, train, large if train is Contender.split else batches)
        warming = {name: one.run(WARM_UP) for name, one in timed.items()}
        usual = statistics.median(warming[RIVAL].values())
        for name, walls in warming.items():
            looking[name].extend(walls[number] / usual for number in (4, 8, 16))
        for _ in range(PAIRS):
            for name in shuffle.sample(others, len(others)):
                found = {one: timed[one].turn() for one in shuffle.sample([RIVAL, name], 2)}
                ordinary[name].append(found[name] / found[RIVAL])
        del timed
        gc.collect()
    return {name: (ratio_of(ordinary[name] or [1.0]), ratio_of(looking[name])) for name in WAYS}


def main() -> None:
    options = arguments(__doc__)
    sizes = dict([*SIZES.items()][:1]) if options.quick else SIZES
    found = {rows: on_ranks(measured, RANKS, rows, builds) for rows, builds in sizes.items()}
    for rows, run in found.items():
        wall = {name: ratio for name, (ratio, _) in run.items()}
        recorded(wall, RIVAL, sizes[rows] * PAIRS, f"2 ranks, {rows} rows a micro-batch")
    first = found[16]
    lines = [[name, *(run[name][0] for run in found.values())] for name in WAYS]
    looks = ", ".join(f"{first[name][1]} ({name})" for name in OURS)
    text = (
        f"{RANKS} ranks over gloo, windows of {STEPS} micro-batches, a 784-512-512-10 network. Time relative to "
        f"`no_sync` by hand (ordinary windows).\n\n"
    )
    after = f"\n\nWatched windows: {looks} of an ordinary one."
    publish(
        "distributed",
        "Two ranks",
        text + table(["", *(f"{rows} rows" for rows in sizes)], lines) + after,
        ["torch", "accelerate"],
        options,
        ours=OURS,
    )


if __name__ == "__main__":
    main()
