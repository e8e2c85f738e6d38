"""Contrastive losses over all pairs of rows, one process's or all ranks', in memory that is linear in the rows.

One tile of scores is in memory at a time. Every rank keeps its own rows of `a`, and the ranks' rows of `b` are
broadcast one rank's at a time, while the next ones are under way. So, but for a few numbers per row, memory does not
grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from gradaccum.core.contrastive import Described, check_ids, check_rows, check_scalar
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.random_state import RandomState, all_generators, kept
from gradaccum.schedule import checked_count

__all__ = ["info_nce", "sigmoid_loss"]

PairsOf = Tensor | tuple[Tensor, Tensor] | Callable[[Tensor, Tensor], Tensor]
"""What users give: ids of the rows, ids of `a`'s and of `b`'s rows, or a function of numbers of rows."""


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


# Tiles.


class Ranks:
    """The ranks of a process group, or one process; how many rows of `a` and `b` each has."""

    def __init__(
        self, group: dist.ProcessGroup | None, rows: Sequence[int], columns: Sequence[int], device: torch.device
    ) -> None:
        self.group, self.rows, self.columns, self.device = group, rows, columns, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.starts = [0, *itertools.accumulate(columns)][:-1]
        """The numbers of each rank's first row of `b` among all ranks'."""

    def blocks(self, b: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank's rows of `b`, with its number."""
        if self.group is None:
            yield 0, b
            return
        sent = self._send(b, 0)
        for owner in range(len(self.columns)):
            block, work = sent
            if owner + 1 < len(self.columns):
                sent = self._send(b, owner + 1)
            if work is not None:
                work.wait()
            yield owner, block

    def _send(self, tensor: Tensor, owner: int) -> tuple[Tensor, dist.Work | None]:
        assert self.group is not None
        if owner == self.rank:
            block = tensor.detach().contiguous()
        else:
            block = tensor.new_empty(self.columns[owner], *tensor.shape[1:])
        if not block.numel():
            return block, None
        # As bytes, since not every backend knows every type of numbers.
        sender = dist.get_global_rank(self.group, owner)
        return block, dist.broadcast(block.view(torch.uint8), sender, group=self.group, async_op=True)

    def reduced(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Elementwise over ranks."""
        if self.group is not None:
            tensor = tensor.clone()
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def send_back(self, gradient: Tensor, owner: int) -> Tensor | None:
        """The gradient of a rank's rows of `b`, added up over ranks; None on all other ranks."""
        if self.group is not None and gradient.numel():
            dist.reduce(gradient, dist.get_global_rank(self.group, owner), group=self.group)
        return gradient if owner == self.rank else None


class _ByFunction:
    """Pairs for which a user's function of their numbers is true."""

    def __init__(self, ranks: Ranks, function: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
        self.name, self._function, self._device = name, function, ranks.device
        self._before = sum(ranks.rows[: ranks.rank])
        self.digest = torch.zeros(ranks.rows[ranks.rank], dtype=torch.float32, device=ranks.device)
        """Of each row a number that its answers make, over all tiles of a pass."""

    def __call__(self, rows: slice, columns: slice) -> Tensor | None:
        numbers = torch.arange(columns.start, columns.stop, device=self._device)
        with torch.no_grad():
            found = self._function(torch.arange(rows.start, rows.stop, device=self._device) + self._before, numbers)
        expected = (rows.stop - rows.start, columns.stop - columns.start)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or tuple(found.shape) != expected:
            received = f"{found.dtype}, shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(
                f"`{self.name}(rows, columns)` must return a bool tensor of shape (len(rows), len(columns)), here "
                f"{expected}. Received: {received}."
            )
        found = found.to(self._device)
        weights = (numbers * 2654435761 // 128 % 2039 + 1).float()
        with torch.no_grad(), torch.autocast(found.device.type, enabled=False):
            self.digest[rows] += found.float() @ weights
        return found


def _pairs(given: PairsOf | None, name: str, ranks: Ranks) -> Callable[[slice, slice], Tensor | None]:
    """Of each pair of a tile whether it is meant; None where none is."""
    if callable(given):
        return _ByFunction(ranks, given, name)
    if given is None and name == "ignore":
        return lambda rows, columns: None
    first = ranks.starts[ranks.rank]
    if given is None:  # row i and row i, of the same rank
        of_b = torch.arange(sum(ranks.columns), device=ranks.device)
        of_a = of_b[first : first + ranks.rows[ranks.rank]]
    else:
        ids = given if isinstance(given, tuple) else (given, given)
        # A copy, as backward looks at them again, whatever has become of the user's tensor.
        of_a, own = ids[0].to(ranks.device, torch.int64, copy=True), ids[1].to(ranks.device, torch.int64)
        negatives = ranks.columns[ranks.rank] - len(own)  # of every row
        own = torch.cat([own, own.new_full((negatives,), torch.iinfo(torch.int64).min)])
        of_b = torch.cat([block for _, block in ranks.blocks(own)])

    def same(rows: slice, columns: slice) -> Tensor | None:
        if given is None and (first + rows.start >= columns.stop or columns.start >= first + rows.stop):
            return None
        return of_a[rows, None] == of_b[columns]

    return same


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
        self, ranks: Ranks, positives: PairsOf | None, ignore: PairsOf | None, tile: int, dtype: torch.dtype
    ) -> None:
        self.ranks, self.tile, self.dtype = ranks, tile, dtype
        self._positives, self._ignored = _pairs(positives, "positives", ranks), _pairs(ignore, "ignore", ranks)
        self._functions = [pairs for pairs in (self._positives, self._ignored) if isinstance(pairs, _ByFunction)]
        self._random: RandomState | None = None
        self._first: list[Tensor] = []

    def slices(self, stop: int, start: int = 0) -> list[slice]:
        return [slice(first, min(first + self.tile, stop)) for first in range(start, stop, self.tile)]

    def tiles(self, a: Tensor, block: Tensor, owner: int, scale: Tensor, bias: Tensor | None) -> Iterator[Tile]:
        """Those of this rank's rows of `a` and of the rows of `b` that belong to `owner`."""
        first = self.ranks.starts[owner]
        for rows in self.slices(len(a)):
            scaled = a[rows].to(self.dtype) * scale
            for of_block in self.slices(len(block)):
                columns = slice(first + of_block.start, first + of_block.stop)
                b = block[of_block].to(self.dtype)
                scores = _product(scaled, b)
                if bias is not None:
                    scores = scores + bias
                positives, ignored = self._positives(rows, columns), self._ignored(rows, columns)
                if ignored is not None:
                    scores = scores.masked_fill(ignored if positives is None else ignored & ~positives, -float("inf"))
                yield Tile(rows, columns, of_block, scaled, b, scores, positives)

    @contextlib.contextmanager
    def same_answers(self) -> Iterator[None]:
        """Around each pass over all tiles: users' functions have to answer as in the first one.

        Random numbers of PyTorch's, Python's and NumPy's generators are those of the first pass in every other one.
        """
        for pairs in self._functions:
            pairs.digest = torch.zeros_like(pairs.digest)
        if self._random is None:
            before = RandomState(all_generators([self.ranks.device]) if self._functions else ())
            yield
            self._random, self._first = before.only(before.moved()), [pairs.digest for pairs in self._functions]
            return
        with kept(self._random.states):
            self._random.put_back()
            yield
        for pairs, first in zip(self._functions, self._first, strict=True):
            if not torch.equal(pairs.digest, first):
                raise NotEquivalentError(
                    f"`{pairs.name}(rows, columns)` returns other pairs in backward than in forward, so the gradient "
                    "would be that of another loss. It reads something that has changed since, or draws from a "
                    "generator of its own. Draw before the loss is called, or copy what it reads."
                )


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
        return _product(grad, b.T) if of_a else None, _product(grad.T, a.T) if of_b else None


_product: Callable[[Tensor, Tensor], Tensor] = _Product.apply


class TiledLoss(torch.autograd.Function):
    """An objective of all scores, and its gradient, from tiles that are computed again in backward.

    An objective looks at all tiles (`add`), has a `value` then, and its `derivative` by each score of a tile, which may
    use up the scores. Nothing in `add` and `value` is done in place, so that both can be differentiated.
    """

    @staticmethod
    def forward(ctx: Any, scores: Scores, make: Callable[[], CrossEntropy | Sigmoid], *inputs: Tensor | None) -> Tensor:
        ctx.scores, ctx.make, ctx.objective = scores, make, make()
        ctx.save_for_backward(*inputs)
        return _value(scores, ctx.objective, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _differentiable if torch.is_grad_enabled() else _gradients
        return None, None, *gradients(ctx, grad, ctx.needs_input_grad[2:], *ctx.saved_tensors)


def _value(scores: Scores, objective: CrossEntropy | Sigmoid, a: Any, b: Any, temperature: Any, bias: Any) -> Tensor:
    scale = temperature.to(scores.dtype).reciprocal()
    with torch.autocast(a.device.type, enabled=False):
        with scores.same_answers():
            for owner, block in scores.ranks.blocks(b):
                for tile in scores.tiles(a, block, owner, scale, bias):
                    objective.add(tile)
        return objective.value()


def _gradients(
    ctx: Any, grad: Tensor, needed: Sequence[bool], a: Tensor, b: Tensor, temperature: Tensor, bias: Tensor | None
) -> list[Tensor | None]:
    dtype, ranks = ctx.scores.dtype, ctx.scores.ranks
    for_a, for_b, for_temperature, for_bias = needed
    scale = temperature.to(dtype).reciprocal()
    # Each rank has the loss of all: what all of them do with it is what a row is responsible for.
    grad = ranks.reduced(grad.to(dtype))
    of_a = a.new_zeros(a.shape, dtype=dtype) if for_a or for_temperature else None
    of_b: Tensor | None = None
    of_bias = grad.new_zeros(()) if for_bias else None
    with torch.autocast(a.device.type, enabled=False), ctx.scores.same_answers():
        for owner, block in ranks.blocks(b):
            of_block = block.new_zeros(block.shape, dtype=dtype) if for_b else None
            for tile in ctx.scores.tiles(a, block, owner, scale, bias):
                _add_gradients(ctx.objective.derivative(tile), tile, of_a, of_block, of_bias)
            if of_block is not None:
                own = ranks.send_back(of_block, owner)
                of_b = of_b if own is None else own
    found: list[Tensor | None] = [None] * 4
    if of_a is not None:
        of_a *= scale * grad
        found[0] = of_a.to(a.dtype) if for_a else None
        found[2] = (-(of_a * a).sum() * scale).to(temperature.dtype) if for_temperature else None
    found[1] = None if of_b is None else of_b.mul_(grad).to(b.dtype)
    found[3] = None if of_bias is None or bias is None else (of_bias * grad).to(bias.dtype)
    return found


def _add_gradients(
    derivative: Tensor, tile: Tile, of_a: Tensor | None, of_block: Tensor | None, of_bias: Tensor | None
) -> None:
    if of_a is not None:
        of_a[tile.rows].addmm_(derivative, tile.b)
    if of_block is not None:
        of_block[tile.block].addmm_(derivative.T, tile.a)
    if of_bias is not None:
        of_bias += derivative.sum()


def _differentiable(ctx: Any, grad: Tensor, needed: Sequence[bool], *inputs: Tensor | None) -> list[Tensor | None]:
    """The same under `create_graph=True`: gradients that can be differentiated again, so all tiles stay."""
    if ctx.scores.ranks.group is not None:
        raise NotImplementedError(
            "Second derivatives of a contrastive loss over ranks are not implemented (create_graph=True with `group`). "
            "Leave out `group`, or gather the rows by torch.distributed.nn.functional.all_gather."
        )
    with torch.enable_grad():
        # Under names of their own, so that the user's hooks see finished gradients alone.
        own = [t.view_as(t) if of_t and t is not None else t for t, of_t in zip(inputs, needed, strict=True)]
        loss = _value(ctx.scores, ctx.make(), *own)
    wanted = [tensor for tensor, is_needed in zip(own, needed, strict=True) if is_needed and tensor is not None]
    found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


class _Softmax:
    """The softmax of every row (`dim` 1), or of every column (0), put together from tiles.

    Of the rows of each tile it knows their largest score, `sum exp(score - largest)`, the sum of the positives' scores,
    and the number of positives.
    """

    def __init__(self, tiles: list[slice], dim: int, scores: Scores) -> None:
        self._dim, self._empty = dim, torch.zeros(0, dtype=scores.dtype, device=scores.ranks.device)
        self._parts = {}
        for tile in tiles:
            zeros = self._empty.new_zeros(tile.stop - tile.start)
            self._parts[tile.start] = zeros - float("inf"), zeros, zeros, zeros

    def add(self, start: int, scores: Tensor, positives: Tensor | None) -> None:
        top, total, positive, number = self._parts[start]
        largest = torch.maximum(top, scores.detach().amax(self._dim))
        shift = _finite(largest)
        total = total * (top - shift).exp() + (scores - shift.unsqueeze(self._dim)).exp().sum(self._dim)
        if positives is not None:
            positive = positive + torch.where(positives, scores, 0.0).sum(self._dim)
            number = number + positives.sum(self._dim)
        self._parts[start] = largest, total, positive, number

    def mean(self, ranks: Ranks, share: float) -> Tensor:
        """`share` of the mean of `log sum exp(scores) - mean(positive scores)` over the rows that have a positive.

        Afterwards `weight` and `positive_weight` are those of its derivative.
        """
        top, total, positive, number = (torch.cat(parts) for parts in zip((self._empty,) * 4, *self._parts.values()))
        self._parts = {}
        if self._dim == 0:  # every rank has seen all columns, against rows of its own
            largest = ranks.reduced(top, dist.ReduceOp.MAX)
            total = total * (top - _finite(largest)).exp()
            top, (total, positive, number) = largest, ranks.reduced(torch.stack([total, positive, number]))
        self.shift, has = _finite(top), number > 0
        count, total = has.sum().to(total.dtype), total.where(has, 1.0)
        losses = self.shift + total.log() - positive / number.clamp(min=1.0)
        loss = losses.where(has, 0.0).sum()
        if self._dim == 1:
            count, loss = ranks.reduced(count), ranks.reduced(loss)
        each = share / count.clamp(min=1)
        self.weight = (has / total).detach() * each
        self.positive_weight = has / number.clamp(min=1.0) * each
        return loss * each


def _finite(top: Tensor) -> Tensor:
    """What is subtracted from scores: their largest, or 0 where there is none."""
    return top.masked_fill(top == -float("inf"), 0.0)


class CrossEntropy:
    """The mean over rows of `logsumexp(scores) - mean(positive scores)`; of columns, too, where symmetric."""

    def __init__(self, scores: Scores, rows: int, *, symmetric: bool) -> None:
        self._ranks = scores.ranks
        self._of_rows, self._of_columns = _Softmax(scores.slices(rows), 1, scores), None
        if symmetric:
            sizes = zip(self._ranks.starts, self._ranks.columns, strict=True)
            columns = [tile for start, size in sizes for tile in scores.slices(start + size, start)]
            self._of_columns = _Softmax(columns, 0, scores)

    def add(self, tile: Tile) -> None:
        self._of_rows.add(tile.rows.start, tile.scores, tile.positives)
        if self._of_columns is not None:
            self._of_columns.add(tile.columns.start, tile.scores, tile.positives)

    def value(self) -> Tensor:
        if self._of_columns is None:
            return self._of_rows.mean(self._ranks, 1.0)
        return self._of_rows.mean(self._ranks, 0.5) + self._of_columns.mean(self._ranks, 0.5)

    def derivative(self, tile: Tile) -> Tensor:
        rows, columns = self._of_rows, self._of_columns
        found = (tile.scores - rows.shift[tile.rows, None]).exp_().mul_(rows.weight[tile.rows, None])
        weight = rows.positive_weight[tile.rows, None]
        if columns is not None:
            found += tile.scores.sub_(columns.shift[tile.columns]).exp_().mul_(columns.weight[tile.columns])
            weight = weight + columns.positive_weight[tile.columns]
        return found if tile.positives is None else found.sub_(torch.where(tile.positives, weight, 0.0))


class Sigmoid:
    """`-sum log sigmoid(+-score) / rows` over pairs, + for positives."""

    def __init__(self, scores: Scores) -> None:
        self._ranks, self._rows = scores.ranks, max(sum(scores.ranks.rows), 1)
        self._sum = torch.zeros((), dtype=scores.dtype, device=scores.ranks.device)

    def add(self, tile: Tile) -> None:
        scores = tile.scores if tile.positives is None else torch.where(tile.positives, -tile.scores, tile.scores)
        self._sum = self._sum - F.logsigmoid(-scores).sum()

    def value(self) -> Tensor:
        return self._ranks.reduced(self._sum) / self._rows

    def derivative(self, tile: Tile) -> Tensor:
        found = tile.scores.sigmoid_()
        return (found if tile.positives is None else found.sub_(tile.positives.to(found.dtype))).div_(self._rows)
