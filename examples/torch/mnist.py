"""A small convolutional network on FashionMNIST, with gradients accumulated over micro-batches that fit.

    python examples/torch/mnist.py                # an epoch or two on FashionMNIST, or on scikit-learn's digits
    python examples/torch/mnist.py --quick        # some seconds on the digits

One line differs from plain training: the optimizer is wrapped.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
from torch import nn

import gradaccum.torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # where `examples.demo` is found
from examples.demo.data import Data, load
from examples.demo.progress import Progress


def tensors(data: Data, part: str) -> torch.utils.data.TensorDataset:
    pictures, labels = getattr(data, f"{part}_x"), getattr(data, f"{part}_y")
    side = round(data.features**0.5)
    x = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, side, side) / data.scale
    return torch.utils.data.TensorDataset(nn.functional.interpolate(x, (28, 28)), torch.tensor(labels))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4 * 4 * 50, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def train(model: nn.Module, loader: torch.utils.data.DataLoader, optimizer: gradaccum.torch.optim.Optimizer) -> None:
    model.train()
    for x, y in optimizer.batches(loader):  # closes the short last window, too
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: torch.utils.data.DataLoader) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)  # type: ignore[arg-type]  # a dataset with a length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="some seconds on scikit-learn's digits")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    with Progress() as progress:
        data = load("digits" if arguments.quick else "auto", progress=progress)
    train_set, test_set = tensors(data, "train"), tensors(data, "test")
    train_loader = torch.utils.data.DataLoader(train_set, arguments.batch_size, shuffle=True)
    test_loader = torch.utils.data.DataLoader(test_set, 500)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = gradaccum.torch.optim.Optimizer(optimizer, steps=arguments.steps)  # the line

    for epoch in range(1 if arguments.quick else arguments.epochs):
        train(model, train_loader, optimizer)
        print(f"epoch {epoch + 1}: {optimizer.updates} updates, test accuracy {accuracy(model, test_loader):.1%}")


if __name__ == "__main__":
    main()
