"""The model of docs/scaling.md against two ranks (gloo, on this machine): updates of DDP with windows of any length."""

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.distributed import RANKS, Contender, network
from benchmarks.harness import WARM_UP, arguments, on_ranks, publish, table
from benchmarks.scaling_model import Link, Scaling

STEPS, ROWS = (1, 2, 4, 8, 16), 64


def train_window(contender: Contender, batches: list[tuple[torch.Tensor, torch.Tensor]], every: bool = False) -> None:
    """A window by hand, which is reduced at its end or in every micro-batch."""
    for number, (x, y) in enumerate(batches, 1):
        with contextlib.nullcontext() if every or number == len(batches) else contender.model.no_sync():
            (nn.functional.cross_entropy(contender.model(x), y) / len(batches)).backward()
    contender.optimizer.step()
    contender.optimizer.zero_grad()


def measured(rank: int, rounds: int, warm_up: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each part, and of each window in both ways, one after the other in each round; the gradients' bytes.

    A round's order changes: what a process has just done shows in what it does next.
    """
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(ROWS, 784, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()))

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    parts: dict[str, Callable[[], object]] = {
        "passes": lambda: nn.functional.cross_entropy(model(x), y).backward(),
        "message": lambda: dist.all_reduce(torch.zeros(2)),
        "reduction": lambda: dist.all_reduce(gradients),
        "update": update,
    }
    for steps in STEPS:
        batches = [(x, y)] * steps
        parts[f"window of {steps}"] = functools.partial(train_window, Contender(), batches)
        parts[f"each of {steps}"] = functools.partial(train_window, Contender(), batches, every=True)
    found: dict[str, list[float]] = {name: [] for name in parts}
    shuffle = random.Random(0)  # the same on all ranks
    for round_ in range(warm_up + rounds):
        for name in shuffle.sample(list(parts), len(parts)):
            dist.barrier()
            start = time.perf_counter()
            parts[name]()
            if round_ >= warm_up:  # DDP makes its buckets anew after the first
                found[name].append(time.perf_counter() - start)
    return found, gradients.nbytes


def model_of(parts: dict[str, list[float]], gradient_bytes: int) -> Scaling:
    """Its numbers, each measured by itself: none is fitted to the updates that it is compared with."""
    middle = {name: statistics.median(each) for name, each in parts.items()}
    latency = middle["message"] / 2
    link = Link(gradient_bytes / (middle["reduction"] - middle["message"]), latency)
    low, _, high = statistics.quantiles(parts["passes"], n=4)
    spread = (high - low) / 1.349 / middle["passes"]
    return Scaling(middle["passes"], gradient_bytes, link, middle["update"], overlap=0.0, spread=spread)


def main() -> None:
    options = arguments(__doc__)
    parts, gradient_bytes = on_ranks(measured, RANKS, *((3, 2) if options.quick else (100, WARM_UP)))
    job = model_of(parts, gradient_bytes)
    middle = {name: statistics.median(each) for name, each in parts.items()}
    unit = middle["window of 1"]
    rows = []
    for steps in STEPS:
        window, every = middle[f"window of {steps}"], middle[f"each of {steps}"]
        model = [job.update_time(RANKS, steps, every_micro_batch=each) for each in (False, True)]
        rows.append([steps, window / unit, model[0] / window, every / unit, model[1] / every])
    head = ["steps", "one reduction", "model / measured", "a reduction each", "model / measured"]
    block = (
        f"{RANKS} ranks over gloo, one core each, {ROWS} rows in a micro-batch, a 784-512-512-10 network. Times of an "
        f"update, relative to windows of one step:\n\n{table(head, rows)}"
    )
    once, each = ([row[column] for row in rows] for column in (2, 4))
    in_short = (
        f"For windows of {STEPS[0]} to {STEPS[-1]} steps the model predicts {min(once):.2f} to {max(once):.2f} of the "
        f"measured time with one reduction a window, and {min(each):.2f} to {max(each):.2f} with one in\n"
        "each micro-batch ([measured](benchmarks.md#several-ranks-by-a-model))."
    )
    publish(
        "scaling", "Several ranks, by a model", block, ["torch"], options, blocks={"docs/scaling.md#scaling": in_short}
    )


if __name__ == "__main__":
    main()
