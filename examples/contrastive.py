"""A contrastive model of pictures and words: 2048 pairs per update, in the memory of 64.

Pictures of FashionMNIST are matched with the words of their labels. The loss of a pair looks at all other pairs of its
batch, so accumulating the losses of micro-batches trains something else: their rows see 63 others in place of 2047.
Chunking the two encoders and computing the loss over the whole batch gives the large batch's update.

    python examples/contrastive.py --out docs/images/contrastive.png        # FashionMNIST, a few minutes
    python examples/contrastive.py --quick                                  # seconds on scikit-learn's digits
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from gradaccum.torch import chunked

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # where `examples.demo` is found
from examples.demo.data import load
from examples.demo.progress import Progress

FASHION = ["t-shirt top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Pictures(nn.Module):
    """From square pictures to points on a sphere."""

    def __init__(self, dimensions: int = 32) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.out = nn.Linear(32 * 16, dimensions)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.out(self.convolutions(x).flatten(1)), dim=1)


class Words(nn.Module):
    """From the letters of a few words to points on the same sphere."""

    def __init__(self, dimensions: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 24, padding_idx=0)
        self.reads = nn.GRU(24, 48, batch_first=True)
        self.out = nn.Linear(48, dimensions)

    def forward(self, text: Tensor) -> Tensor:
        _, last = self.reads(self.letters(text))
        return F.normalize(self.out(last[0]), dim=1)


class Model(nn.Module):
    """Both encoders, and the temperature between them."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda encoder: encoder) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pictures, self.words = wrap(Pictures()), wrap(Words())
        self.temperature = nn.Parameter(torch.tensor(2.66))

    def forward(self, x: Tensor, text: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each picture's words among the batch's words, and the other way round."""
        logits = self.pictures(x) @ self.words(text).T * self.temperature.exp()
        same = (labels[:, None] == labels).to(logits.dtype)
        targets = same / same.sum(1)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def batches(dataset: str, batch_size: int, updates: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Shuffled batches of pictures, letters and labels, epoch after epoch."""
    with Progress() as progress:
        data = load(dataset, progress=progress)  # type: ignore[arg-type]  # checked by argparse
    names = FASHION if data.name == "FashionMNIST" else DIGITS
    letters = torch.zeros(len(names), max(map(len, names)), dtype=torch.int64)
    for index, name in enumerate(names):
        letters[index, : len(name)] = torch.tensor([ord(letter) for letter in name])
    side = round(data.features**0.5)
    x = torch.from_numpy(data.train_x / data.scale).to(dtype).view(-1, 1, side, side)
    labels = torch.from_numpy(data.train_y)
    generator = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(batch_size):
            if len(rows) < batch_size:
                break
            yield x[rows], letters[labels[rows]], labels[rows]
            updates -= 1
            if updates == 0:
                return


class Run(NamedTuple):
    """One training."""

    losses: list[float]
    """The loss of each update."""
    gradient: Tensor
    """The first update's."""
    path: Tensor
    """All parameters, before the first update and after each."""


def train(kind: str, arguments: argparse.Namespace) -> Run:
    """Train one model on the same batches in the same order."""
    size, dtype = arguments.micro_batch_size, getattr(torch, arguments.dtype)
    model = Model((lambda encoder: chunked(encoder, size)) if kind == "chunked" else lambda encoder: encoder).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses, gradients, path = [], [], [parameters_to_vector(model.parameters()).detach()]
    for batch in batches(arguments.dataset, arguments.batch_size, arguments.updates, dtype):
        optimizer.zero_grad()
        if kind == "naive":
            parts = list(zip(*(tensor.split(size) for tensor in batch), strict=True))
            loss = torch.zeros(())
            for part in parts:
                share = model(*part) / len(parts)
                share.backward()
                loss = loss + share.detach()
        else:
            loss = model(*batch)
            loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients.append(parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None]).clone())
        optimizer.step()
        path.append(parameters_to_vector(model.parameters()).detach())
    return Run(losses, gradients[0], torch.stack(path))


def distance(run: Run, large: Run) -> Tensor:
    """After each update, the distance from the large batch's parameters, as a share of their movement."""
    way = (large.path - large.path[0]).norm(dim=1)
    return ((run.path - large.path).norm(dim=1) / way)[1:]


def draw(runs: dict[str, Run], arguments: argparse.Namespace) -> None:
    """The losses, and how far the parameters are from the large batch's."""
    import matplotlib.pyplot as plt

    rows, size = arguments.batch_size, arguments.micro_batch_size
    names = {
        "large batch": f"{rows} rows at once",
        "chunked": f"chunked encoders: {rows} rows, {size} in memory",
        "naive": f"naive accumulation: {rows // size} losses of {size} rows",
    }
    styles: dict[str, dict[str, Any]] = {
        "large batch": {"color": "black", "linewidth": 1.2},
        "chunked": {"color": "tab:green", "linewidth": 5, "alpha": 0.45},
        "naive": {"color": "tab:red", "linewidth": 1.8, "linestyle": "--"},
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    updates = range(1, arguments.updates + 1)
    for kind in ("chunked", "naive", "large batch"):
        left.plot(updates, runs[kind].losses, label=names[kind], **styles[kind])
        if kind != "large batch":
            right.semilogy(updates, distance(runs[kind], runs["large batch"]), label=names[kind], **styles[kind])
    left.set(xlabel="update", ylabel="the loss that is minimised", title="Training")
    right.set(xlabel="update", ylabel="share of the way", title="Distance from the large batch's parameters")
    left.legend()
    right.legend()
    figure.savefig(arguments.out, dpi=110, metadata={"Software": None})


def main(argv: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dataset", choices=["auto", "fashion-mnist", "digits"], default="auto")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--out", type=pathlib.Path, help="where to put the picture")
    parser.add_argument("--quick", action="store_true", help="4 updates of 192 of scikit-learn's digits")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.dataset, arguments.batch_size, arguments.updates = "digits", 192, 4
    runs = {kind: train(kind, arguments) for kind in ("large batch", "chunked", "naive")}
    large = runs["large batch"]
    for kind in ("chunked", "naive"):
        run = runs[kind]
        error = ((run.gradient - large.gradient).norm() / large.gradient.norm()).item()
        print(
            f"{kind:8}  first gradient off by {error:.1e}, parameters in the end by "
            f"{distance(run, large)[-1].item():.1e}, last loss {run.losses[-1]:.6f} ({large.losses[-1]:.6f})"
        )
    if arguments.out is not None:
        draw(runs, arguments)
        print(f"Wrote {arguments.out}")
    return runs


if __name__ == "__main__":
    main()
