"""The text's PyTorch side: a decoder of two blocks that predicts the next character."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from examples.demo.guide_torch import CountBytes
from examples.demo.text import LARGE, OURS, WRITTEN, Loop, TextSetup
from torch import Tensor, nn
from torch.nn import functional as F

import gradaccum.torch

__all__ = ["Decoder", "loss_of", "padded", "train"]

CHARACTERS, HEADS, BLOCKS = 128, 2, 2
IGNORED = -100
Batch = tuple[Tensor, Tensor]
"""Characters, and the next ones; padding is `IGNORED` in the second."""


def train(setup: TextSetup, rows: Sequence[str], test: Sequence[str], notify: Callable[[str], None]) -> list[Loop]:
    """The three loops from the same weights on the same rows, in a process of their own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    initial = Decoder(setup).double()
    size = setup.batch_size // setup.steps
    large, small = (list(padded(rows, each)) for each in (setup.batch_size, size))
    loops: list[tuple[str, _Loop, list[Batch], int]] = [
        (LARGE, _large, large, 1),
        (OURS, _ours, small, setup.steps),
        (WRITTEN, _written, small, setup.steps),
    ]
    record: list[Loop] = []
    path: list[Tensor] = []
    start, (x, y) = _flat(initial), next(padded(test, len(test)))
    for name, loop, batches, steps in loops:
        model = copy.deepcopy(initial)
        losses, distances, own = [], [], []
        for _ in loop(
            model, _optimizer(model, setup.learning_rate), batches, steps, setup.epochs, functools.partial(notify, name)
        ):
            with torch.no_grad():
                losses.append(loss_of(model, x, y).item())
            own.append(_flat(model))
        path = path or own
        for mine, theirs in zip(own, path, strict=True):
            distances.append(float((mine - theirs).norm() / (theirs - start).norm()))
        record.append(
            Loop(name, losses, distances, _peak(copy.deepcopy(initial).float(), loop, batches[:steps], steps))
        )
    return record


class Decoder(nn.Module):
    """Characters in, logits of the next ones out; `setup.width` features, causal attention, nothing dropped."""

    def __init__(self, setup: TextSetup) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, setup.width)
        self.positions = nn.Embedding(setup.length, setup.width)
        self.blocks = nn.Sequential(*[_Block(setup.width) for _ in range(BLOCKS)])
        self.out = nn.Sequential(nn.LayerNorm(setup.width), nn.Linear(setup.width, CHARACTERS))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (rows, length, characters)."""
        result: Tensor = self.out(self.blocks(self.characters(x) + self.positions(torch.arange(x.shape[1]))))
        return result


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend_to, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.attend_to(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.mix(x)
        return result


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the characters that are there."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


_Loop = Callable[[nn.Module, Any, Sequence[Batch], int, int, Callable[[], None]], Iterator[None]]
"""Yields after each update, and calls the last argument after each epoch."""


def _large(
    model: nn.Module, optimizer: Any, batches: Sequence[Batch], steps: int, epochs: int, over: Callable[[], None]
) -> Iterator[None]:
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            yield
        over()


def _ours(
    model: nn.Module, optimizer: Any, batches: Sequence[Batch], steps: int, epochs: int, over: Callable[[], None]
) -> Iterator[None]:
    optimizer = gradaccum.torch.optim.Optimizer(optimizer, steps)
    for _ in range(epochs):
        for x, y in optimizer.batches(batches, weight=_characters):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            if optimizer.updated:
                yield
        over()


def _written(
    model: nn.Module, optimizer: Any, batches: Sequence[Batch], steps: int, epochs: int, over: Callable[[], None]
) -> Iterator[None]:
    """What tutorials show: means of means, and an epoch's last window divided by the full number of steps."""
    for _ in range(epochs):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches, start=1):
            loss = loss_of(model, x, y) / steps
            loss.backward()
            if i % steps == 0 or i == len(batches):
                optimizer.step()
                optimizer.zero_grad()
                yield
        over()


def _characters(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())


def _optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


def padded(rows: Sequence[str], size: int) -> Iterator[Batch]:
    """Batches padded to their longest row."""
    for start in range(0, len(rows), size):
        codes = [torch.tensor(list(row.encode())) for row in rows[start : start + size]]
        x = nn.utils.rnn.pad_sequence(codes, batch_first=True)
        y = nn.utils.rnn.pad_sequence([c[1:] for c in codes], batch_first=True, padding_value=IGNORED)
        yield x[:, :-1].contiguous(), y


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _peak(model: nn.Module, loop: _Loop, window: Sequence[Batch], steps: int) -> int:
    """The most bytes of tensors alive in the first window, without the rows, which are in memory already."""
    with CountBytes(model.parameters()) as count:
        for _ in loop(model, torch.optim.SGD(model.parameters()), window, steps, 1, lambda: None):
            pass
    return count.peak
