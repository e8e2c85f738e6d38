"""What measuring the noise scale costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import gradaccum.torch
from benchmarks.harness import (
    WARM_UP,
    arguments,
    keep_freed_memory,
    looks,
    publish,
    ratio_of,
    ratios,
    recorded,
)

STEPS = 4
loss_function = nn.CrossEntropyLoss()


def small_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(32, 128), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(128 * 32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "784-512-512-10, 16 rows": (
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        (784,),
        16,
    ),
    "the same, 64 rows": (
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        (784,),
        64,
    ),
    "2 transformer layers, 16 rows of 32": (small_transformer, (32, 32), 16),
    "32-64-10, 16 rows": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
        (32,),
        16,
    ),
}


def by_optimizer(make: Callable[[], nn.Module], batches: list, noise_scale: bool) -> Callable[[], None]:
    model = make()
    inner = torch.optim.Adam(model.parameters(), lr=1e-4)
    optimizer = gradaccum.torch.optim.Optimizer(inner, STEPS, noise_scale=noise_scale)

    def epoch() -> None:
        for x, y in optimizer.batches(batches):
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

    return epoch


def by_train_step(make: Callable[[], nn.Module], batches: list, noise_scale: bool) -> Callable[[], None]:
    model = make()
    step = gradaccum.torch.TrainStep(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-4),
        loss_fn=loss_function,
        micro_batch_size=len(batches[0][0]),
        noise_scale=noise_scale,
        verify=False,
    )
    joined = [
        tuple(torch.cat(parts) for parts in zip(*batches[start : start + STEPS], strict=True))
        for start in range(0, len(batches), STEPS)
    ]

    def epoch() -> None:
        for x, y in joined:
            step(x, y)

    return epoch


def main() -> None:
    options = arguments(__doc__, cuda=True)
    torch.set_num_threads(1)
    keep_freed_memory()
    rounds, count = (5, 8) if options.quick else (21, 16)
    warm_up = WARM_UP * STEPS // count
    rows, watched = [], dict[str, list[float]]()
    for name, (make, shape, size) in NETWORKS.items():
        batches = [(torch.randn(size, *shape), torch.randint(10, (size,))) for _ in range(count)]
        line: list[object] = [name]
        for way in (by_optimizer, by_train_step):
            both = {"without": way(make, batches, False), "with": way(make, batches, True)}
            about = f"{name}, {way.__name__.removeprefix('by_')}"
            line.append(ratios(both, "without", rounds, about=about, warm_up=warm_up)["with"])
        rows.append(line)
        for noise_scale in (True, False):
            for _ in range(rounds // 5):
                found = looks(by_optimizer(make, batches[:STEPS], noise_scale))
                watched.setdefault("with" if noise_scale else "without", []).extend(found)
    looking = {which: ratio_of(times) for which, times in watched.items()}
    recorded(looking, "an ordinary window", rounds // 5, "watched")
    wrapped, stepped = (f"{min(column):.2f} to {max(column):.2f}" for column in list(zip(*rows, strict=True))[1:])
    overhead = f"{wrapped} for a wrapped optimizer, and {stepped} for `TrainStep`"
    body = f"""Time with `noise_scale=True` relative to the time without, on four networks, in windows of {STEPS}
micro-batches with Adam (one thread, median of {rounds} rounds): {overhead}.
Watched windows of a wrapped optimizer take {looking["with"]} ordinary ones, and
{looking["without"]} without `noise_scale`; `TrainStep` has `verify=False`."""
    publish("noise_scale", "Measuring the noise scale", body, ["torch"], options, ours=["with"])


if __name__ == "__main__":
    main()
