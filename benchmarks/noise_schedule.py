"""Windows that follow the noise scale against fixed ones: updates and rows until a loss, on real pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from examples.demo.data import load
from examples.demo.progress import Progress
from torch import Tensor, nn

import gradaccum.torch
from benchmarks.harness import arguments, publish, table
from gradaccum import NoiseSchedule

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "noise_schedule.png"
ROWS = 16
SMALLEST, LARGEST = 2, 32
RATE = 0.01
EVERY = 50


def data(quick: bool) -> tuple[str, Tensor, Tensor, Tensor, Tensor]:
    with Progress() as progress:
        found = load("auto", progress=progress)
    pictures, others = (torch.from_numpy(x.copy()).float() / found.scale - 0.3 for x in (found.train_x, found.test_x))
    count = 4000 if quick else 20000
    return (
        found.name,
        pictures[:count],
        torch.from_numpy(found.train_y)[:count],
        others[:2000],
        torch.from_numpy(found.test_y)[:2000],
    )


def run(steps: Any, rate: float, seed: int, budget: int, sets: Any) -> list[tuple[int, int, float]]:
    """`(rows, updates, validation loss)` along a training of so many rows."""
    _, x, y, test_x, test_y = sets
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = gradaccum.torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, steps=steps)
    loss_fn = nn.CrossEntropyLoss()
    found, rows, last = [], 0, 0
    while rows < budget:
        for batch in torch.randperm(len(x)).split(ROWS):
            optimizer.zero_grad()
            loss_fn(model(x[batch]), y[batch]).backward()
            optimizer.step()
            rows += len(batch)
            if optimizer.updated and rows - last >= 16 * ROWS:
                last = rows
                with torch.no_grad():
                    found.append((rows, optimizer.updates, loss_fn(model(test_x), test_y).item()))
            if rows >= budget:
                break
    optimizer.discard()
    return found


def contenders() -> dict[str, Callable[[], tuple[Any, float]]]:
    middle = 8
    return {
        f"{SMALLEST * ROWS} rows": lambda: (SMALLEST, RATE),
        f"{middle * ROWS} rows": lambda: (middle, RATE * middle / SMALLEST),
        f"{LARGEST * ROWS} rows": lambda: (LARGEST, RATE * LARGEST / SMALLEST),
        "NoiseSchedule": lambda: (NoiseSchedule(SMALLEST, LARGEST, every=EVERY, scale_learning_rate="linear"), RATE),
    }


def reached(path: list[tuple[int, int, float]], goal: float) -> tuple[float, float]:
    """Rows and updates until the loss, smoothed over five looks, is at most the goal."""
    for index in range(4, len(path)):
        if statistics.fmean(loss for _, _, loss in path[index - 4 : index + 1]) <= goal:
            return path[index][:2]
    return float("nan"), float("nan")


def draw(paths: dict[str, list[tuple[int, int, float]]], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, column, label in zip(axes, (0, 1), ("rows", "updates"), strict=True):
        for contender, path in paths.items():
            axis.plot([point[column] for point in path], [point[2] for point in path], label=contender, lw=1.2)
        axis.set_xlabel(label)
        axis.set_xscale("log")
    axes[0].set_ylabel(f"validation loss, {name}")
    axes[0].legend(frameon=False)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    seeds, budget = (1, 20_000) if options.quick else (3, 120_000)
    sets = data(options.quick)
    paths: dict[str, list[list[tuple[int, int, float]]]] = {}
    last = 0
    for contender, make in contenders().items():
        for seed in range(seeds):
            steps, rate = make()
            paths.setdefault(contender, []).append(run(steps, rate, seed, budget, sets))
            if isinstance(steps, NoiseSchedule):
                last = steps.steps * ROWS
    best = max(min(loss for _, _, loss in path) for found in paths.values() for path in found)
    goal = round(best * 1.03, 2)
    rows = []
    for contender, found in paths.items():
        counts = [reached(path, goal) for path in found]
        rows.append([contender, *(f"{statistics.median(each):,.0f}" for each in zip(*counts, strict=True))])
    head = ["windows", f"rows to a validation loss of {goal}", "updates to it"]
    body = f"""SGD with momentum on {sets[0]}, micro-batches of {ROWS}, a learning rate of {RATE:g} at
{SMALLEST * ROWS} rows and proportional to the rows, median of {seeds} seeds.
`NoiseSchedule({SMALLEST}, {LARGEST}, every={EVERY}, scale_learning_rate="linear")` ended at {last} rows.

{table(head, rows)}

![Validation loss over rows and over updates](images/noise_schedule.png)"""
    if options.write:
        draw({contender: found[0] for contender, found in paths.items()}, sets[0])
    publish("noise_schedule", "Windows that follow the noise scale", body, ["torch"], options, ours=["NoiseSchedule"])


if __name__ == "__main__":
    main()
