"""Contrastive losses over all pairs of rows, in memory that is linear in the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.core.contrastive import Described, check_ids, check_rows, check_scalar
from gradaccum.schedule import checked_count
from gradaccum.torch.contrastive.tiles import CrossEntropy, PairsOf, Ranks, Scores, Sigmoid, TiledLoss


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

    With one positive per row this is `cross_entropy(scores, labels)`; with several it is
    [SupCon's](https://arxiv.org/abs/2004.11362) loss. Memory holds the rows, a few numbers per row, and one tile of
    scores, which backward computes again. Half-precision rows are compared and summed in float32, inside autocast too,
    and the loss is then float32.

    Args:
        a: Rows, (N, size). They are not normalized; do that before, if your loss does.
        b: Rows, (M, size). Without `positives`, row i belongs to row i of `a`; the others are negatives of all rows.
        temperature: Divides the scores. A tensor of one number gets its gradient: `1 / scale`, `(-logit_scale).exp()`.
        tile: Rows and columns of the scores that are in memory at a time.
        symmetric: Whether rows of `b` are compared with those of `a`, too.
        positives: The pairs that belong together. A tensor of N ints gives pair i an id, and rows with the same id
            belong together; a tuple of two such tensors, of N and M, gives ids of `a`'s and of `b`'s rows; a function
            of row numbers and column numbers returns a bool tensor of shape (rows, columns). None: row i and row i.
        ignore: Pairs that are neither positive nor negative, such as false negatives, in the same form. Those among
            `positives` stay positives. Backward calls functions again, with the same random numbers.
        group: The process group whose ranks' rows are all compared, such as `torch.distributed.group.WORLD`; None
            compares this process's rows only. Ranks may differ in rows. The loss is the same on all ranks, and all must
            differentiate it. Gradients are those of the sum of all ranks' losses, so DistributedDataParallel's mean
            over ranks is the large batch's gradient. Functions get numbers that count all ranks' rows, rank 0's first.

    Returns:
        A scalar, 0 if no row has a positive.

    Raises:
        TypeError, ValueError: An argument is invalid, or the ranks' arguments don't go together.
        NotEquivalentError: In backward, a function returns something else than in forward.

    Example:
        >>> a, b = (torch.nn.functional.normalize(torch.randn(64, 8)).requires_grad_() for _ in "ab")
        >>> loss = info_nce(a, b, tile=16)
        >>> loss.backward()
        >>> scores, labels = a @ b.T / 0.07, torch.arange(64)
        >>> plain = [torch.nn.functional.cross_entropy(logits, labels) for logits in (scores, scores.T)]
        >>> torch.testing.assert_close(loss, sum(plain) / 2)
    """
    return _loss("info_nce", a, b, temperature, None, tile, bool(symmetric), positives, ignore, group)


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
    """[SigLIP's](https://arxiv.org/abs/2303.15343) loss, a binary classification of every pair, in tiles.

        loss = -1/N sum_ij log sigmoid(z_ij s_ij),    s_ij = <a_i, b_j> / temperature + bias,    z = 1 or -1

    where z is 1 for positives. N counts the rows of `a`, over all ranks.

    Args:
        a: As for `info_nce`.
        b: As for `info_nce`.
        temperature: Divides the scores: a number, or a tensor of one, which gets its gradient.
        bias: Added to the scores: a number, or a tensor of one, which gets its gradient.
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
    return _loss("sigmoid_loss", a, b, temperature, bias, tile, False, positives, ignore, group)


def _loss(name: str, *arguments: Any) -> Tensor:
    if torch.compiler.is_compiling():  # loops over tiles would become as many operations
        return torch._dynamo.disable(_tiled)(name, *arguments)
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            f"{name} is called inside of a transform of torch.func (grad, vmap, jvp ...), which its gradient in tiles "
            "doesn't support. Use backward() or torch.autograd.grad."
        )
    return _tiled(name, *arguments)


def _tiled(
    name: str,
    a: Any,
    b: Any,
    temperature: Any,
    bias: Any,
    tile: Any,
    symmetric: bool,
    positives: PairsOf | None,
    ignore: PairsOf | None,
    group: Any,
) -> Tensor:
    check = functools.partial(_checked, a, b, temperature, bias, tile, positives, ignore)
    if group is None:
        check()
        ranks = Ranks(None, [len(a)], [len(b)], a.device)
    else:
        ranks = _ranks(name, check, a, b, temperature, bias, symmetric, group)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)  # half precision is summed in it
    scores = Scores(ranks, positives, ignore, tile, dtype)
    if bias is None:
        make: Any = functools.partial(CrossEntropy, scores, len(a), symmetric=symmetric)
    else:
        make, bias = functools.partial(Sigmoid, scores), _scalar(bias, a.device, dtype)
    return TiledLoss.apply(scores, make, a, b, _scalar(temperature, a.device, dtype), bias)


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device)
    return torch.tensor(float(value), dtype=dtype, device=device)


# The checks: of one rank's arguments, and of what has to be the same on all.

_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _checked(a: Any, b: Any, temperature: Any, bias: Any, tile: Any, positives: Any, ignore: Any) -> list[int]:
    """Raise for wrong arguments. Returns the kinds of the pairs."""
    check_rows(a, b, _described, "a dense tensor", may_be_empty=True)
    if a.device != b.device:
        raise ValueError(f"`a` and `b` must be on the same device. Received: {a.device} and {b.device}.")
    checked_count(tile, "tile")
    check_scalar(temperature, "temperature", _described, "a tensor")
    if bias is not None:
        check_scalar(bias, "bias", _described, "a tensor", positive=False)
    pairs = ("positives", positives), ("ignore", ignore)
    return [check_ids(g, name, len(a), len(b), _described, "a tensor", functions=True) for name, g in pairs]


def _described(value: Any) -> Described | None:
    if not isinstance(value, Tensor):
        return None
    dtype, is_dense = str(value.dtype).removeprefix("torch."), value.layout is torch.strided
    if not is_dense or value.dtype == torch.uint64 or (value.is_floating_point() and value.dtype not in _DTYPES):
        dtype = f"{value.layout} {dtype.replace('u', 'unsigned ')}"
    readable = is_dense and value.is_cpu and value.numel() == 1 and value.is_floating_point()
    return Described(dtype, tuple(value.shape), float(value.detach()) if readable else None)


_PAIRS = ("None", "a function", "ids")
_SUMMARY: dict[str, Sequence[Any]] = {
    "the size of a row": (),
    "the dtype of `a`": _DTYPES, "the dtype of `b`": _DTYPES,
    **{f"whether `{name}` needs a gradient": ("no gradient needed", "a gradient needed")
       for name in ("a", "b", "temperature", "bias")},
    "`temperature`": (), "`bias`": (),
    "`symmetric`": (False, True),
    "the kind of `positives`": _PAIRS, "the kind of `ignore`": _PAIRS,
}  # fmt: skip
"""What ranks compare, as numbers, and what the numbers stand for where they stand for something."""


def _summary(kinds: list[int], a: Tensor, b: Tensor, temperature: Any, bias: Any, symmetric: bool) -> list[Any]:
    inputs = a, b, temperature, bias
    learned = [isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled() for t in inputs]
    numbers = [float(0.0 if t is None else t.detach() if isinstance(t, Tensor) else t) for t in inputs[2:]]
    dtypes = _DTYPES.index(a.dtype), _DTYPES.index(b.dtype)
    return [len(a), len(b), a.shape[1], *dtypes, *learned, *numbers, symmetric, *kinds]


def _ranks(
    name: str,
    check: Callable[[], list[int]],
    a: Any,
    b: Any,
    temperature: Any,
    bias: Any,
    symmetric: bool,
    group: Any,
) -> Ranks:
    """Whose rows there are, once all arguments have been checked, on all ranks."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "`group` must be a process group, such as torch.distributed.group.WORLD after init_process_group(), or "
            f"None for this process's rows alone. Received: group={group!r}."
        )
    problem: Exception | None = None
    summary: list[Any] = [0] * (2 + len(_SUMMARY))
    try:
        summary = _summary(check(), a, b, temperature, bias, symmetric)
    except (TypeError, ValueError) as error:
        problem = error
    device = a.device if isinstance(a, Tensor) else torch.device("cpu")
    mine = torch.tensor([problem is None, *summary], dtype=torch.float64, device=device)
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, mine, group=group)
    if problem is not None:
        raise problem
    passed, rows, columns, *values = torch.stack(received, 1).tolist()
    if not all(passed):
        raise ValueError(f"{name} was called with wrong arguments on rank {passed.index(0)}, whose error names them.")
    for (what, words), of_ranks in zip(_SUMMARY.items(), values, strict=True):
        if len(set(map(str, of_ranks))) > 1:  # NaN is equal to NaN here
            listed = ", ".join(str(words[int(value)]) if words else f"{value:g}" for value in of_ranks)
            raise ValueError(
                f"The ranks call {name} differently: {what} must be the same. Received, by rank: {listed}."
            )
    return Ranks(None if len(received) == 1 else group, [*map(int, rows)], [*map(int, columns)], device)
