"""The model of docs/scaling.md against two ranks (gloo, on this machine): updates of DDP with windows of any length."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.distributed import RANKS, Contender, network
from benchmarks.harness import arguments, on_ranks, publish, table
from gradaccum.sizes import Link, Scaling

STEPS, ROWS = (1, 2, 4, 8, 16), 64


def timed(function: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each call, which all ranks begin together."""
    found = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return found[1:]


def measured(rank: int, rounds: int) -> tuple[dict[str, list[float]], int, dict[int, list[float]]]:
    """Seconds of the parts, the gradients' bytes, and seconds of updates of each length in both ways."""
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(ROWS, 784, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()))

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    passes = timed(lambda: nn.functional.cross_entropy(model(x), y).backward(), 4 * rounds)
    parts = {
        "passes": passes,
        "message": timed(lambda: dist.all_reduce(torch.zeros(2)), 4 * rounds),
        "reduction": timed(lambda: dist.all_reduce(gradients), 4 * rounds),
        "update": timed(update, rounds),
    }
    windows = {}
    for steps in STEPS:
        ways = Contender(), Contender()
        batches = [(x, y)] * steps

        def window(one: Contender = ways[0], steps: int = steps, batches: list[Any] = batches) -> None:
            one.no_sync(batches, steps)

        def every(one: Contender = ways[1], steps: int = steps, batches: list[Any] = batches) -> None:
            one.every_micro_batch(batches, steps)

        windows[steps] = [statistics.median(timed(way, rounds)) for way in (window, every)]
    return parts, gradients.nbytes, windows


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
    parts, gradient_bytes, windows = on_ranks(measured, RANKS, 3 if options.quick else 40)
    job = model_of(parts, gradient_bytes)
    unit = windows[1][0]
    rows = []
    for steps, (window, every) in windows.items():
        told = [job.update_time(RANKS, steps, every_micro_batch=each) for each in (False, True)]
        rows.append(
            [steps, window / unit, told[0] / unit, told[0] / window, every / unit, told[1] / unit, told[1] / every]
        )
    head = [
        "steps",
        "one reduction: measured",
        "model",
        "model / measured",
        "a reduction each: measured",
        "model",
        "model / measured",
    ]
    block = (
        f"{RANKS} ranks over gloo, one core each, {ROWS} rows in a micro-batch, the guide's network. The model's "
        "numbers are measured in the same run, by themselves: passes, a reduction of the gradients and of two numbers, "
        "an optimizer's step. Times of an update, as ratios to that of one step:\n\n"
        f"{table(head, rows)}\n\n"
        f"A reduction takes {statistics.median(parts['reduction']) / job.seconds:.2f} of a micro-batch's passes, whose "
        f"spread is {job.spread:.2f}."
    )
    publish(
        "scaling", "Several ranks, by a model", block, ["torch"], options, blocks={"docs/scaling.md#scaling": block}
    )


if __name__ == "__main__":
    main()
