"""Contrastive losses over all pairs of rows, in memory that is linear in the rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.torch.contrastive.rows import Inputs, PairsOf
from gradaccum.torch.contrastive.tiles import CrossEntropy, Scores, Sigmoid, TiledLoss

__all__ = ["info_nce", "sigmoid_loss"]


def info_nce(
    a: Tensor,
    b: Tensor,
    *,
    temperature: float | Tensor = 0.07,
    tile: int = 1024,
    symmetric: bool = True,
    positives: PairsOf | None = None,
    ignore: PairsOf | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Contrastive cross entropy of every row against all others, in tiles: the matrix of all pairs never exists.

    With the scores `s_ij = <a_i, b_j> / temperature`, and the positives P(i) of row i:

        L(a, b) = mean_i [ log sum_j exp(s_ij) - mean_{p in P(i)} s_ip ]          over rows i that have a positive
        loss    = (L(a, b) + L(b, a)) / 2                                         or L(a, b), where not symmetric

    With one positive each this is `cross_entropy(scores, labels)`; with several, SupCon's loss. Forward and backward
    keep rows, numbers per row, and one tile of scores; backward computes the scores anew. Half-precision rows are
    compared and summed in float32, inside of autocast, too; the loss is float32 then.

    Args:
        a: Rows, (N, size). They are compared as they are: normalise them before, where that is meant.
        b: Rows, (M, size). Without `positives`, the first N belong to those of `a`; the others are negatives of all.
        temperature: What scores are divided by. A tensor of one number gets its gradient: `1 / scale`,
            `(-logit_scale).exp()`.
        tile: Rows and columns of the scores that are in memory at a time.
        symmetric: Whether rows of `b` look for theirs among those of `a`, too.
        positives: The pairs that belong together: ids of the pairs (a tensor of N ints: rows with the same id belong
            together), ids of `a`'s and of `b`'s rows (a tuple of two such tensors, of N and M), or a function of the
            numbers of rows and columns, which returns a bool tensor of shape (rows, columns). None: row i and row i.
        ignore: Pairs that count as neither positive nor negative, such as false negatives; given likewise. Those
            among `positives` stay positives. Backward asks functions again, with the random numbers of the first time.
        group: The process group over whose ranks all rows are compared, `torch.distributed.group.WORLD` say; None:
            this process's rows alone. Ranks may differ in rows; the loss is the same on all of them, and all must
            differentiate it. Gradients are those of the sum of what all ranks make of the loss, as through a
            differentiable all-gather, so that the mean over ranks, which DistributedDataParallel takes, is the large
            batch's. Numbers of rows, in functions, count all ranks' rows, rank 0's first.

    Returns:
        A scalar. 0 where no row has a positive.

    Raises:
        TypeError, ValueError: An argument is none of what it must be, or the ranks' arguments don't go together.
        NotEquivalentError: In backward: a function answers otherwise than in forward.

    Example:
        >>> a, b = (torch.nn.functional.normalize(torch.randn(64, 8)).requires_grad_() for _ in "ab")
        >>> loss = info_nce(a, b, tile=16)
        >>> loss.backward()
        >>> scores, labels = a @ b.T / 0.07, torch.arange(64)
        >>> plain = [torch.nn.functional.cross_entropy(logits, labels) for logits in (scores, scores.T)]
        >>> torch.testing.assert_close(loss, sum(plain) / 2)
    """
    _check_no_transform("info_nce")
    return _eager(_info_nce)(a, b, temperature, None, tile, bool(symmetric), positives, ignore, group)


def sigmoid_loss(
    a: Tensor,
    b: Tensor,
    *,
    temperature: float | Tensor = 0.1,
    bias: float | Tensor = -10.0,
    tile: int = 1024,
    positives: PairsOf | None = None,
    ignore: PairsOf | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """SigLIP's loss: every pair is judged by itself, in tiles.

        loss = -1/N sum_ij log sigmoid(z_ij s_ij),    s_ij = <a_i, b_j> / temperature + bias,    z = 1 or -1

    where z is 1 for positives. N counts the rows of `a`, over all ranks.

    Args:
        a: As for `info_nce`.
        b: As for `info_nce`.
        temperature: What scores are divided by: a number, or a tensor of one, which gets its gradient.
        bias: What is added to scores, likewise.
        tile: Rows and columns of the scores that are in memory at a time.
        positives: As for `info_nce`.
        ignore: As for `info_nce`.
        group: As for `info_nce`.

    Returns:
        A scalar.

    Raises:
        TypeError, ValueError: As for `info_nce`.

    Example:
        >>> a, b = (torch.nn.functional.normalize(torch.randn(64, 8)) for _ in "ab")
        >>> signs, scores = 2 * torch.eye(64) - 1, a @ b.T / 0.1 - 10
        >>> plain = -torch.nn.functional.logsigmoid(signs * scores).sum() / 64
        >>> torch.testing.assert_close(sigmoid_loss(a, b, tile=16), plain)
    """
    if bias is None:
        raise TypeError("`bias` must be a number, or a tensor that holds one. Received: bias=None; 0.0 adds nothing.")
    _check_no_transform("sigmoid_loss")
    return _eager(_sigmoid_loss)(a, b, temperature, bias, tile, False, positives, ignore, group)


def _info_nce(*arguments: Any) -> Tensor:
    inputs = Inputs("info_nce", *arguments)
    scores = _scores(inputs)
    objective = functools.partial(CrossEntropy, scores, len(inputs.a), symmetric=inputs.symmetric)
    return TiledLoss.apply(scores, objective, inputs.a, inputs.b, *inputs.numbers())


def _sigmoid_loss(*arguments: Any) -> Tensor:
    inputs = Inputs("sigmoid_loss", *arguments)
    scores = _scores(inputs)
    return TiledLoss.apply(scores, functools.partial(Sigmoid, scores), inputs.a, inputs.b, *inputs.numbers())


def _scores(inputs: Inputs) -> Scores:
    exchange = inputs.exchange()
    return Scores(exchange, *inputs.pairs(exchange), inputs.tile, inputs.dtype)


def _check_no_transform(name: str) -> None:
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            f"{name} is called inside of a transform of torch.func (grad, vmap, jvp ...), and its gradient, from tiles "
            "that are computed anew, is torch.autograd's. Use backward() or torch.autograd.grad."
        )


def _eager(function: Any) -> Any:
    """The function, which a compiler leaves as it is: its loops over tiles would become as many operations."""
    return torch._dynamo.disable(function) if torch.compiler.is_compiling() else function
