"""What is made of the scores: cross entropy over rows and columns, or a sigmoid of each pair."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradaccum.torch.contrastive.ranks import SingleProcess
from gradaccum.torch.contrastive.tiles import Scores, Tile, slices

__all__ = ["CrossEntropy", "Sigmoid"]


class Running(NamedTuple):
    """Of some rows, what is known of the scores seen so far. Of columns likewise."""

    top: Tensor
    """The largest score."""
    total: Tensor
    """`sum exp(score - top)`."""
    positive: Tensor
    """The sum of the positives' scores."""
    number: Tensor
    """How many positives there are."""

    @classmethod
    def empty(cls, length: int, dtype: torch.dtype, device: torch.device) -> Running:
        zeros = torch.zeros(length, dtype=dtype, device=device)
        return cls(zeros - float("inf"), zeros, zeros, zeros)

    def plus(self, scores: Tensor, positives: Tensor | None, dim: int) -> Running:
        top = torch.maximum(self.top, scores.detach().amax(dim))
        shift = _finite(top)
        total = self.total * (self.top - shift).exp() + (scores - shift.unsqueeze(dim)).exp().sum(dim)
        if positives is None:
            return Running(top, total, self.positive, self.number)
        positive = self.positive + torch.where(positives, scores, 0.0).sum(dim)
        return Running(top, total, positive, self.number + positives.sum(dim))

    def over(self, exchange: SingleProcess) -> Running:
        """The same over all ranks' rows."""
        top = exchange.maximum(self.top)
        total = self.total * (self.top - _finite(top)).exp()
        return Running(top, *exchange.total(torch.stack([total, self.positive, self.number])))


class Denominators:
    """The softmax of every row, or of every column, put together from tiles."""

    def __init__(self, tiles: list[slice], dim: int, scores: Scores) -> None:
        self.dim = dim
        self.parts = {
            tile.start: Running.empty(tile.stop - tile.start, scores.dtype, scores.exchange.device) for tile in tiles
        }
        self._none = Running.empty(0, scores.dtype, scores.exchange.device)

    def add(self, start: int, tile: Tile) -> None:
        self.parts[start] = self.parts[start].plus(tile.scores, tile.positives, self.dim)

    def finish(self, exchange: SingleProcess, *, columns: bool) -> None:
        """All tiles have been seen: each row's loss is `shift + log(total) - positive / number`."""
        whole = Running(*(torch.cat(parts) for parts in zip(self._none, *self.parts.values(), strict=True)))
        self.parts = {}
        if columns:
            whole = whole.over(exchange)
        self.shift, has = _finite(whole.top), whole.number > 0
        count = has.sum().to(whole.total.dtype)
        self.rows = (count if columns else exchange.total(count)).clamp(min=1)
        losses = self.shift + whole.total.where(has, 1.0).log() - whole.positive / whole.number.clamp(min=1.0)
        self.sum = losses.where(has, 0.0).sum()
        if not columns:
            self.sum = exchange.total(self.sum)
        self.weight = (has / whole.total.where(has, 1.0)).detach()
        self.positive_weight = has / whole.number.clamp(min=1.0)

    def mean(self, share: float) -> Tensor:
        """`share` of the mean over the rows that have a positive; then the weights are its derivative's."""
        self.weight, self.positive_weight = (
            weight * (share / self.rows) for weight in (self.weight, self.positive_weight)
        )
        return self.sum * (share / self.rows)


def _finite(top: Tensor) -> Tensor:
    """What is subtracted from scores: their largest, or 0 where there is none."""
    return top.masked_fill(top == -float("inf"), 0.0)


class CrossEntropy:
    """The mean over rows of `logsumexp(scores) - mean(positive scores)`; of columns, too, where symmetric."""

    def __init__(self, scores: Scores, rows: int, *, symmetric: bool) -> None:
        self.exchange, self.symmetric = scores.exchange, symmetric
        self.of_rows = Denominators(slices(0, rows, scores.tile), 1, scores)
        columns = [
            tile
            for start, length in zip(self.exchange.starts, self.exchange.columns, strict=True)
            for tile in slices(start, start + length, scores.tile)
        ]
        self.of_columns = Denominators(columns if symmetric else [], 0, scores)

    def add(self, tile: Tile) -> None:
        self.of_rows.add(tile.rows.start, tile)
        if self.symmetric:
            self.of_columns.add(tile.columns.start, tile)

    def value(self) -> Tensor:
        self.of_rows.finish(self.exchange, columns=False)
        if not self.symmetric:
            return self.of_rows.mean(1.0)
        self.of_columns.finish(self.exchange, columns=True)
        return self.of_rows.mean(0.5) + self.of_columns.mean(0.5)

    def derivative(self, tile: Tile) -> Tensor:
        rows, columns = self.of_rows, self.of_columns
        found = (tile.scores - rows.shift[tile.rows, None]).exp_().mul_(rows.weight[tile.rows, None])
        weight = rows.positive_weight[tile.rows, None]
        if self.symmetric:
            found += tile.scores.sub_(columns.shift[tile.columns]).exp_().mul_(columns.weight[tile.columns])
            weight = weight + columns.positive_weight[tile.columns]
        return found if tile.positives is None else found.sub_(torch.where(tile.positives, weight, 0.0))


class Sigmoid:
    """`-sum log sigmoid(+-score) / rows` over pairs, + for positives."""

    def __init__(self, scores: Scores) -> None:
        self.exchange = scores.exchange
        self.rows = max(sum(self.exchange.rows), 1)
        self.sum = torch.zeros((), dtype=scores.dtype, device=self.exchange.device)

    def add(self, tile: Tile) -> None:
        scores = tile.scores if tile.positives is None else torch.where(tile.positives, -tile.scores, tile.scores)
        self.sum = self.sum - F.logsigmoid(-scores).sum()

    def value(self) -> Tensor:
        return self.exchange.total(self.sum) / self.rows

    def derivative(self, tile: Tile) -> Tensor:
        found = tile.scores.sigmoid_()
        return (found if tile.positives is None else found.sub_(tile.positives.to(found.dtype))).div_(self.rows)
