"""A loss over all pairs of rows, of which one tile is in memory at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradaccum.torch.contrastive.pairs import Answers, Pairs
from gradaccum.torch.contrastive.ranks import AllRanks, SingleProcess

__all__ = ["Objective", "Scores", "Tile", "TiledLoss", "slices"]


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
    """`a @ b.T / temperature + bias`, a tile at a time.

    Args:
        exchange: Whose rows there are.
        positives: The pairs that belong together.
        ignored: Pairs that count as neither, unless they are positives; or None.
        tile: Rows and columns of a tile.
        dtype: What is computed in.
    """

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
    scale = temperature.to(scores.dtype).reciprocal()
    # Each rank has the loss of all: what all of them do with it is what a row is responsible for.
    grad = scores.exchange.total(grad.to(scores.dtype))
    of_a = a.new_zeros(a.shape, dtype=scores.dtype) if needed[0] or needed[2] else None
    of_bias, mine = grad.new_zeros(()), None
    with torch.autocast(a.device.type, enabled=False), scores.answers.the_same():
        for owner, block in scores.exchange.blocks(b):
            of_block = block.new_zeros(block.shape, dtype=scores.dtype) if needed[1] else None
            for tile in scores.of(a, block, owner, scale, bias):
                derivative = objective.derivative(tile)
                if of_a is not None:
                    of_a[tile.rows].addmm_(derivative, tile.b)
                if of_block is not None:
                    of_block[tile.block].addmm_(derivative.T, tile.a)
                if needed[3]:
                    of_bias += derivative.sum()
            if of_block is not None:
                sent = scores.exchange.send_back(of_block, owner)
                mine = sent if sent is not None else mine
        of_temperature = None
        if of_a is not None:
            of_a *= scale * grad
            if needed[2]:
                of_temperature = (-(of_a * a).sum() * scale).to(temperature.dtype)
    return [
        of_a.to(a.dtype) if of_a is not None and needed[0] else None,
        mine.mul_(grad).to(b.dtype) if mine is not None else None,
        of_temperature,
        (of_bias * grad).to(bias.dtype) if bias is not None and needed[3] else None,
    ]


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
