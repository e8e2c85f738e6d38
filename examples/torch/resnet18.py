"""A ResNet-18 on FashionMNIST whose BatchNorm sees all 256 rows of an update, in the memory of fewer.

    python examples/torch/resnet18.py                # some minutes on FashionMNIST
    python examples/torch/resnet18.py --quick        # seconds on scikit-learn's digits, in float64

Three trainings start from the same weights and see the same rows: the large batch; micro-batches with
`batch_norm="exact"`, which normalizes by the statistics of all rows and makes the large batch's update; and plain
micro-batches, which BatchNorm normalizes one by one, so this is another training.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import sys

import torch
from torch import Tensor, nn

from gradaccum.torch import TrainStep

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # where `examples.demo` is found
from examples.demo.data import load
from examples.demo.progress import Progress


class Block(nn.Module):
    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inward, outward, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outward),
            nn.ReLU(),
            nn.Conv2d(outward, outward, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outward),
        )
        projection = [nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)]
        self.shortcut = nn.Sequential(*(projection if (inward, stride) != (outward, 1) else []))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """For small grey pictures; `width` channels in the first of four stages."""
    stages = []
    for stage in range(4):
        inward, outward = width * 2 ** max(stage - 1, 0), width * 2**stage
        stages += [Block(inward, outward, 1 if stage == 0 else 2), Block(outward, outward, 1)]
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def train(model: nn.Module, x: Tensor, y: Tensor, rows: int, size: int, batch_norm: str, updates: int) -> nn.Module:
    """Train for so many updates of `rows` rows, in micro-batches of `size`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    loss_fn = nn.CrossEntropyLoss()
    step = TrainStep(model, optimizer, loss_fn=loss_fn, micro_batch_size=size, batch_norm=batch_norm)
    for update in range(updates):
        chosen = torch.arange(update * rows, (update + 1) * rows) % len(x)
        step(x[chosen], y[chosen])
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="seconds on scikit-learn's digits, in float64")
    arguments = parser.parse_args()
    quick = arguments.quick
    rows, size, width, updates = (48, 16, 2, 3) if quick else (256, 32, 16, arguments.updates)
    with Progress() as progress:
        data = load("digits" if quick else "auto", progress=progress)
    dtype = torch.float64 if quick else torch.float32
    x, test_x = (
        torch.from_numpy(part.copy()).to(dtype).unflatten(1, (1, int(data.features**0.5), -1)) / data.scale
        for part in (data.train_x[: rows * updates], data.test_x[: 200 if quick else 2000])
    )
    y, test_y = torch.from_numpy(data.train_y), torch.from_numpy(data.test_y[: len(test_x)])
    torch.manual_seed(0)
    start = resnet18(width).to(dtype)
    ways = {"large batch": (rows, "micro"), 'batch_norm="exact"': (size, "exact"), "as it is": (size, "micro")}
    models = {name: train(copy.deepcopy(start), x, y, rows, *way, updates) for name, way in ways.items()}
    large = {name: value.double() for name, value in models["large batch"].state_dict().items()}
    print(f"{data.name}: {updates} updates of {rows} rows, in micro-batches of {size}")
    for name, model in models.items():
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_y).double().mean()
        far = max(
            (value - large[key]).abs().max() / large[key].abs().max() for key, value in model.state_dict().items()
        )
        print(f"{name}: accuracy {right:.1%}, parameters and statistics {far:.1e} from the large batch's")


if __name__ == "__main__":
    main()
