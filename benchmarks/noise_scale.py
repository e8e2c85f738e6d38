"""What measuring the noise scale costs: the same training with and without it, in windows of 4 micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

import gradaccum.torch
from benchmarks.harness import arguments, keep_freed_memory, publish, ratios, seconds, table

loss_function = nn.CrossEntropyLoss()


def small_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(32, 128), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(128 * 32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "the guide's, 784-512-512-10, 16 rows": (
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
    optimizer = gradaccum.torch.optim.Optimizer(inner, 4, noise_scale=noise_scale)

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
        tuple(torch.cat(parts) for parts in zip(*batches[start : start + 4], strict=True))
        for start in range(0, len(batches), 4)
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
    rows = []
    for name, (make, shape, size) in NETWORKS.items():
        batches = [(torch.randn(size, *shape), torch.randint(10, (size,))) for _ in range(count)]
        line: list[object] = [name]
        for way in (by_optimizer, by_train_step):
            both = {"without": way(make, batches, False), "with": way(make, batches, True)}
            about = f"{name}, {way.__name__.removeprefix('by_')}"
            line.append(ratios(both, "without", rounds, about=about)["with"])
        rows.append(line)
    reading = gradaccum.torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.1, steps=2, noise_scale=True)
    for _ in range(1000):
        reading.backward((torch.randn(4) * reading.param_groups[0]["params"][0]).sum(), weight=1)
        reading.step()
        reading.zero_grad()
    milliseconds = statistics.median(seconds(lambda: reading.noise_scale) for _ in range(9)) * 1e3
    body = f"""Time with `noise_scale=True` over the time without it, windows of 4 micro-batches, Adam (one thread,
median of {rounds} interleaved rounds).

{table(["network", "wrapped optimizer", "`TrainStep`"], rows)}

Reading `noise_scale` after 500 windows takes {milliseconds:.1f} ms."""
    publish("noise_scale", "Measuring the noise scale", body, ["torch"], options, ours=["with"])


if __name__ == "__main__":
    main()
