"""TrainStep against the hand-written loop over micro-batches, and "auto" against an exhaustive sweep of sizes."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import (
    WARM_UP,
    arguments,
    in_fresh_process,
    keep_freed_memory,
    publish,
    ratio_of,
    ratios,
    seconds,
    table,
)
from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes

loss_function = nn.CrossEntropyLoss()
Batch = tuple[torch.Tensor, torch.Tensor]


def guide() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *layers, nn.Flatten(), nn.Linear(64 * 49, 10))


def batch_of(rows: int) -> Batch:
    return torch.randn(rows, 784), torch.randint(10, (rows,))


def by_hand(make: Callable[[], nn.Module], batch: Batch, size: int) -> Callable[[], torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = len(batch[0])

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(batch[0].split(size), batch[1].split(size), strict=True):
            loss = loss_function(model(x), y) * (len(x) / rows)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return update


def by_step(make: Callable[[], nn.Module], batch: Batch, size: int | str) -> tuple[TrainStep, Callable[[], object]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = TrainStep(model, optimizer, loss_fn=loss_function, micro_batch_size=size)  # type: ignore[arg-type]
    return step, lambda: step(*batch)


def fixed(rounds: int) -> str:
    rows = []
    for total, size in ((64, 16), (256, 16), (256, 64), (1024, 256)):
        batch = batch_of(total)
        found = ratios(
            {"by hand": by_hand(guide, batch, size), "TrainStep": by_step(guide, batch, size)[1]},
            "by hand",
            rounds,
            about=f"{total} rows, {size} at a time",
        )
        rows.append([total, size, found["TrainStep"]])
    return table(["rows", "micro-batch", "TrainStep / by hand"], rows)


def wide() -> nn.Module:
    """Ten million parameters."""
    return nn.Sequential(nn.Linear(784, 2900), nn.ReLU(), nn.Linear(2900, 2600), nn.ReLU(), nn.Linear(2600, 10))


def proofs(rounds: int) -> str:
    """What proofs cost: a training of 100 updates with and without them, and the first updates of a large model."""
    batch, whole, first = batch_of(64), [], []
    for _ in range(rounds):
        spent = {}
        for verify in (True, False):
            model = guide()
            step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn=loss_function,
                             micro_batch_size=16, verify=verify)  # fmt: skip
            spent[verify] = seconds(lambda step=step: [step(*batch) for _ in range(100)])
        whole.append(spent[True] / spent[False])
        _, update = by_step(wide, batch, 16)
        times = [seconds(update) for _ in range(7)]
        first.append([time / min(times[4:]) for time in times[:2]])
    one, two = (ratio_of([each[i] for each in first]) for i in (0, 1))
    return (
        f"The first 100 updates, seven of them proven, take {ratio_of(whole)} of the time with `verify=False`. With "
        f"ten\nmillion parameters the first update takes {one} of an ordinary one, the second {two}."
    )


RSS = """
import resource, sys, torch
from benchmarks.train_step import batch_of, by_hand, by_step, cnn
torch.set_num_threads(1)
batch = batch_of(256)
update = by_hand(cnn, batch, 16) if sys.argv[1] == "by hand" else by_step(cnn, batch, 16)[1]
for _ in range(10):
    update()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
"""The peak of a whole process with its first ten updates, proofs among them."""


def several(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[torch.Tensor, object]]:
    """Cross-entropy over the targets that count, and a penalty over rows."""
    outputs = model(x)
    entropy = nn.functional.cross_entropy(outputs, y, ignore_index=0, reduction="sum")
    counts = (y != 0).sum()
    return {"ce": (entropy / counts, counts), "z": (1e-3 * outputs.logsumexp(-1).square().mean(), len(x))}


def counts(x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
    return {"ce": (y != 0).sum(), "z": len(x)}


def alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: loss for name, (loss, _) in several(model, x, y).items()}


def several_by_hand(batch: Batch, size: int, counted: bool) -> Callable[[], torch.Tensor]:
    model = guide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        parts = list(zip(batch[0].split(size), batch[1].split(size), strict=True))
        if counted:
            totals = {"ce": 0.0, "z": 0.0}
            with torch.no_grad():
                for x, y in parts:
                    for name, (_, weight) in several(model, x, y).items():
                        totals[name] += float(weight)  # type: ignore[arg-type]
        else:
            totals = {name: float(weight) for name, weight in counts(*batch).items()}  # type: ignore[arg-type]
        total = torch.zeros(())
        for x, y in parts:
            terms = several(model, x, y).items()
            loss = sum(loss * (float(weight) / totals[name]) for name, (loss, weight) in terms)  # type: ignore[arg-type]
            loss.backward()  # type: ignore[union-attr]
            total += loss.detach()  # type: ignore[union-attr]
        optimizer.step()
        return total

    return update


def several_by_step(batch: Batch, size: int, counted: bool) -> Callable[[], object]:
    model = guide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if counted:
        step = TrainStep(model, optimizer, compute_loss=several, micro_batch_size=size)
    else:
        step = TrainStep(model, optimizer, compute_loss=alone, weight=counts, micro_batch_size=size)
    return lambda: step(*batch)


def terms(rounds: int) -> str:
    rows = []
    for total, size in ((64, 16), (256, 16), (256, 64), (1024, 256)):
        batch = batch_of(total)
        contenders = {
            f"{who}, {how}": make(batch, size, how == "counted")
            for how in ("told", "counted")
            for who, make in (("by hand", several_by_hand), ("TrainStep", several_by_step))
        }
        about = f"two losses, {total} rows, {size} at a time"
        found = ratios(contenders, "by hand, told", rounds, about=about)
        counted = found["TrainStep, counted"]
        rows.append([found["TrainStep, told"], counted / found["by hand, counted"], counted])
    told, counting, cost = (f"{min(column):.2f} to {max(column):.2f}" for column in zip(*rows, strict=True))
    return (
        f"Two losses with a denominator each, of the same rows and sizes: {told} if `weight=` gives the "
        "denominators, and\n"
        f"{counting} if forward passes without gradients count them, each relative to a loop that does the same. "
        f"Counting\ntakes {cost} of the time without."
    )


def searched(rounds: int, fraction: int) -> str:
    rows = []
    for name, make, most in (("small CNN", cnn, 1024), ("784-512-512-10", guide, 8192)):
        total = most // fraction
        batch = batch_of(total)
        step, update = by_step(make, batch, "auto")
        update(), update()
        settled = next(iter(step.state_dict()["sizes"].values()))["settled"]
        sizes = [total >> halvings for halvings in range(9) if total >> halvings]
        for _ in range(WARM_UP - 3):
            update()
        contenders = {str(size): by_hand(make, batch, size) for size in sizes} | {"auto": update}
        about = f"sizes of {total} rows, {name}"
        found = ratios(contenders, str(total), rounds, about=about, warm_up=1)  # loops by hand prove nothing
        best = min(map(str, sizes), key=lambda size: found[size])
        rows.append(
            [
                name, total, f"{best} ({found[best]:.2f} of the whole batch's time)",
                f"{step.micro_batch_size} ({found['auto']:.2f})", found["auto"] / found[best],
                "yes" if settled else "no",
            ]
        )  # fmt: skip
    return table(["network", "rows", "best of the sweep", "auto", "auto / best", "settled in two updates"], rows)


def live_bytes() -> float:
    """Peak bytes of live tensors, over the hand-written loop's."""
    batch = batch_of(256)
    peaks = []
    for update in (by_hand(guide, batch, 32), by_step(guide, batch, 32)[1]):
        update(), update()  # gradients are there, and the third update proves nothing
        with LiveBytes() as live:
            update()
        peaks.append(live.peak)
    return peaks[1] / peaks[0]


def resident() -> float:
    """Peak resident memory of the process over the hand-written loop's."""
    return float(in_fresh_process(RSS, "TrainStep")) / float(in_fresh_process(RSS, "by hand"))


def main() -> None:
    options = arguments(__doc__, cuda=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    torch.manual_seed(0)
    rounds = 1 if options.quick else 5
    found = searched(rounds, 16 if options.quick else 1)
    keep_freed_memory()
    body = f"""Time per update of SGD on a 784-512-512-10 network, median of {20 * rounds} rounds on
{torch.get_num_threads()} threads, after {WARM_UP} updates. Both loops return the large batch's loss.

{fixed(20 * rounds)}

{terms(5 * rounds)}

`micro_batch_size="auto"` compared with the best power of two (median of {rounds} rounds):

{found}

{proofs(3 if options.quick else 7)}

Peak bytes of live tensors are {live_bytes():.3f} of the hand-written loop's. The process' peak on the small CNN with
256 rows, 16 at a time, proofs included, is {resident():.2f} of it."""
    publish(
        "train_step",
        "Splitting the batch",
        body,
        ["torch"],
        options,
        ours=["TrainStep", "auto", "TrainStep, told", "TrainStep, counted"],
    )


if __name__ == "__main__":
    main()
