"""A loss over all pairs of rows, of which one tile of scores is in memory at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from gradaccum.torch.contrastive.rows import AllRanks, Answers, Pairs, SingleProcess

__all__ = ["CrossEntropy", "Scores", "Sigmoid", "TiledLoss"]


def slices(start: int, stop: int, size: int) -> list[slice]:
    """
    >>> slices(3, 8, 4)
    [slice(3, 7, None), slice(7, 8, None)]
    """
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


class Tile(NamedTuple):
    """Some rows of `a` against some rows of `b`."""

    rows: slice
    """Of this rank's `a`."""
    columns: slice
    """Of all ranks' `b`."""
    block: slice
    """The same, within their rank's rows."""
    a: Tensor
    """The rows, divided by the temperature."""
    b: Tensor
    scores: Tensor
    """`a @ b.T`, -inf where a pair is left out."""
    positives: Tensor | None
    """Of each pair whether it is one; None where none is."""


class Scores:
    """`a @ b.T / temperature + bias`, a tile at a time."""

    def __init__(
        self, exchange: SingleProcess, positives: Pairs, ignored: Pairs | None, tile: int, dtype: torch.dtype
    ) -> None:
        self.exchange, self.positives, self.ignored = exchange, positives, ignored
        self.tile, self.dtype = tile, dtype
        self.answers = Answers(positives, ignored)

    def of(self, a: Tensor, block: Tensor, owner: int, scale: Tensor, bias: Tensor | None) -> Iterator[Tile]:
        """The tiles of this rank's rows of `a` and of the rows of `b` that belong to `owner`."""
        first = self.exchange.starts[owner]
        for rows in slices(0, len(a), self.tile):
            scaled = a[rows].to(self.dtype) * scale
            for of_block in slices(0, len(block), self.tile):
                columns = slice(first + of_block.start, first + of_block.stop)
                b = block[of_block].to(self.dtype)
                scores = product(scaled, b)
                if bias is not None:
                    scores = scores + bias
                positives = self.positives.tile(rows, columns)
                ignored = None if self.ignored is None else self.ignored.tile(rows, columns)
                if ignored is not None:
                    scores = scores.masked_fill(ignored if positives is None else ignored & ~positives, -float("inf"))
                yield Tile(rows, columns, of_block, scaled, b, scores, positives)


class _Product(torch.autograd.Function):
    """`a @ b.T`, and its derivatives of any order, as precise as `a` and `b`: inside of autocast, too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with torch.autocast(a.device.type, enabled=False):
            return a @ b.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        return product(grad, b.T) if of_a else None, product(grad.T, a.T) if of_b else None


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T`, which autocast leaves as it is, forward and backward."""
    return _Product.apply(a, b)


class Objective(Protocol):
    """What is made of the scores."""

    def add(self, tile: Tile) -> None:
        """Forward: look at a tile. No operation in place, so that it can be differentiated."""

    def value(self) -> Tensor:
        """The loss, once all tiles have been looked at."""

    def derivative(self, tile: Tile) -> Tensor:
        """Backward: of the loss by each score of a tile. May use up the scores."""


class TiledLoss(torch.autograd.Function):
    """`objective` of all scores, and its gradient, from tiles that are computed anew in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Scores,
        objective_of: Any,
        a: Tensor,
        b: Tensor,
        temperature: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.scores, ctx.objective_of, ctx.objective = scores, objective_of, objective_of()
        ctx.save_for_backward(a, b, temperature, bias)
        return _value(scores, ctx.objective, a, b, temperature, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, temperature, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        gradients = _differentiable if torch.is_grad_enabled() else _gradients
        return None, None, *gradients(ctx, grad, needed, a, b, temperature, bias)


def _value(
    scores: Scores, objective: Objective, a: Tensor, b: Tensor, temperature: Tensor, bias: Tensor | None
) -> Tensor:
    scale = temperature.to(scores.dtype).reciprocal()
    with torch.autocast(a.device.type, enabled=False):
        with scores.answers.the_same():
            for owner, block in scores.exchange.blocks(b):
                for tile in scores.of(a, block, owner, scale, bias):
                    objective.add(tile)
        return objective.value()


def _gradients(
    ctx: Any,
    grad: Tensor,
    needed: tuple[bool, ...],
    a: Tensor,
    b: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
) -> list[Tensor | None]:
    scores, objective = ctx.scores, ctx.objective
    for_a, for_b, for_temperature, for_bias = needed
    scale = temperature.to(scores.dtype).reciprocal()
    # Each rank has the loss of all: what all of them do with it is what a row is responsible for.
    grad = scores.exchange.total(grad.to(scores.dtype))
    of_a = a.new_zeros(a.shape, dtype=scores.dtype) if for_a or for_temperature else None
    of_bias, of_b, found = grad.new_zeros(()), None, list[Tensor | None]()
    with torch.autocast(a.device.type, enabled=False), scores.answers.the_same():
        for owner, block in scores.exchange.blocks(b):
            of_block = block.new_zeros(block.shape, dtype=scores.dtype) if for_b else None
            for tile in scores.of(a, block, owner, scale, bias):
                derivative = objective.derivative(tile)
                if of_a is not None:
                    of_a[tile.rows].addmm_(derivative, tile.b)
                if of_block is not None:
                    of_block[tile.block].addmm_(derivative.T, tile.a)
                if for_bias:
                    of_bias += derivative.sum()
            if of_block is not None:
                sent = scores.exchange.send_back(of_block, owner)
                of_b = of_b if sent is None else sent
        if of_a is not None:
            of_a *= scale * grad
        found.append(of_a.to(a.dtype) if of_a is not None and for_a else None)
        found.append(None if of_b is None else of_b.mul_(grad).to(b.dtype))
        found.append(None)
        if of_a is not None and for_temperature:
            found[2] = (-(of_a * a).sum() * scale).to(temperature.dtype)
    return [*found, (of_bias * grad).to(bias.dtype) if bias is not None and for_bias else None]


def _differentiable(ctx: Any, grad: Tensor, needed: tuple[bool, ...], *inputs: Tensor | None) -> list[Tensor | None]:
    """The same under `create_graph=True`: gradients that can be differentiated again, so all tiles stay."""
    if isinstance(ctx.scores.exchange, AllRanks):
        raise NotImplementedError(
            "Second derivatives of a contrastive loss over ranks are not implemented (create_graph=True with `group`). "
            "Leave out `group`, or gather the rows by torch.distributed.nn.functional.all_gather."
        )
    with torch.enable_grad():
        # Under names of their own, so that the user's hooks see finished gradients alone.
        own = [t.view_as(t) if of_t and t is not None else t for t, of_t in zip(inputs, needed, strict=True)]
        loss = _value(ctx.scores, ctx.objective_of(), *own)  # type: ignore[arg-type]  # the bias alone may be None
    wanted = [tensor for tensor, is_needed in zip(own, needed, strict=True) if is_needed and tensor is not None]
    found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


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
