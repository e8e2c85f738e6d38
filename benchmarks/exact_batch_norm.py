"""Exact BatchNorm in micro-batches against the large batch, in time and in memory, on a ResNet-18."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.chunked import live_bytes
from benchmarks.harness import WARM_UP, arguments, first_call, publish, ratios, table
from gradaccum.torch import chunked

ROWS, SIZE, WIDTH = 256, 32, 16


class Block(nn.Module):
    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outward)
        self.conv2 = nn.Conv2d(outward, outward, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outward)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))
            if stride != 1 or inward != outward
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


def resnet18(width: int = WIDTH) -> nn.Module:
    """For 32 x 32 pixels; `width` channels in the first stage, 64 in the original."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        nn.Sequential(Block(widths[n], widths[n + 1], 1 if n == 0 else 2), Block(widths[n + 1], widths[n + 1], 1))
        for n in range(4)
    ]
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def main() -> None:
    options = arguments(__doc__, cuda=True)
    torch.manual_seed(0)
    model, rows = resnet18(), 64 if options.quick else ROWS
    x, y = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))

    def update(module: nn.Module) -> Callable[[], None]:
        return lambda: F.cross_entropy(module(x), y).backward()

    contenders = {
        "large batch": update(model),
        "exact": update(chunked(model, SIZE, batch_norm="exact")),
        "pooled": update(chunked(model, SIZE, batch_norm="pooled")),
    }
    rounds, warm_up = (2, 1) if options.quick else (7, WARM_UP)
    time = ratios(contenders, "large batch", rounds, about="forward and backward", warm_up=warm_up)
    first = first_call(lambda: update(chunked(model, SIZE, batch_norm="exact")), 1 if options.quick else 5)
    memory = {name: live_bytes(one, [*model.parameters(), x]) for name, one in contenders.items()}
    body = (
        f"A ResNet-18 of width {WIDTH}, {rows} pictures of 32 x 32 pixels, {SIZE} at a time. Forward and backward, "
        "relative to the large batch.\n\n"
        + table(
            ["batch_norm", "time", "live activations"],
            [[name, time[name], memory[name] / memory["large batch"]] for name in contenders],
        )
        + f"\n\nThe first call, which is proven, takes {first} later ones (exact)."
    )
    publish("exact_batch_norm", "Exact BatchNorm", body, ["torch"], options, ours=["exact", "pooled"])


if __name__ == "__main__":
    main()
