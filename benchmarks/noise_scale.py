"""What measuring the noise scale costs, and what normalization layers alone tell of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from examples.demo.data import load
from examples.demo.progress import Progress
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
    table,
)
from gradaccum.on_torch.noise import NoiseChoice

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


def by_train_step(make: Callable[[], nn.Module], batches: list, noise_scale: NoiseChoice) -> Callable[[], None]:
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


class Pictures(nn.Module):
    """Two transformer layers over a picture's lines."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.place = nn.Linear(width, 64), nn.Parameter(torch.zeros(width, 64))
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x) + self.place).mean(1))


def compared(quick: bool) -> tuple[str, str]:
    """The data's name, and what both estimators find along one training: they don't change it."""
    with Progress() as progress:
        found = load("auto", progress=progress)
    width = int(found.train_x.shape[1] ** 0.5)
    x = (torch.from_numpy(found.train_x.copy()).float() / found.scale - 0.3).unflatten(1, (width, width))
    y = torch.from_numpy(found.train_y)
    stretch, rows = (10, []) if quick else (150, [])
    measured = []
    for noise_scale in (True, "layer_norm"):
        torch.manual_seed(0)
        model = Pictures(width)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
        step = gradaccum.torch.TrainStep(
            model, optimizer, loss_fn=loss_function, micro_batch_size=32, noise_scale=noise_scale, verify=False
        )
        line = []
        for update in range(1, 3 * stretch + 1):
            chosen = torch.randint(len(x), (128,))
            step(x[chosen], y[chosen])
            if update % stretch == 0:
                line.append(step.noise_scale.last(stretch))
        measured.append(line)
    for number, (whole, layers) in enumerate(zip(*measured, strict=True)):
        each = [f"{one.value:.0f} ({one.interval[0]:.0f} to {one.interval[1]:.0f})" for one in (whole, layers)]
        rows.append([f"{number * stretch + 1} to {(number + 1) * stretch}", *each, f"{whole.value / layers.value:.2f}"])
    return found.name, table(["updates", "all gradients", "normalization layers, by rows", "ratio"], rows)


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
    make, shape, size = NETWORKS["2 transformer layers, 16 rows of 32"]
    batches = [(torch.randn(size, *shape), torch.randint(10, (size,))) for _ in range(count)]
    both = {"without": by_train_step(make, batches, False), "layer_norm": by_train_step(make, batches, "layer_norm")}
    about = "by normalization layers"
    by_layers = ratios(both, "without", rounds, about=about, warm_up=warm_up)["layer_norm"]
    looking = {which: ratio_of(times) for which, times in watched.items()}
    recorded(looking, "an ordinary window", rounds // 5, "watched")
    name, estimators = compared(options.quick)
    wrapped, stepped = (f"{min(column):.2f} to {max(column):.2f}" for column in list(zip(*rows, strict=True))[1:])
    overhead = f"{wrapped} for a wrapped optimizer, and {stepped} for `TrainStep`"
    body = f"""Time with `noise_scale=True` relative to the time without, on four networks, in windows of {STEPS}
micro-batches with Adam (one thread, median of {rounds} rounds): {overhead}.
Watched windows of a wrapped optimizer take {looking["with"]} ordinary ones, and
{looking["without"]} without `noise_scale`; `TrainStep` has `verify=False`.

`noise_scale="layer_norm"` takes {by_layers} of the time without, with the two transformer layers. The two estimates,
with their 95 % intervals, in one training (two transformer layers of width 64 on {name}, 128 rows in micro-batches of
32, Adam):

{estimators}"""
    publish("noise_scale", "Measuring the noise scale", body, ["torch"], options, ours=["with", "layer_norm"])


if __name__ == "__main__":
    main()
