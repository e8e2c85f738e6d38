"""A linear head over a huge vocabulary and its cross entropy, a tile of rows at a time.

The head returns what stands for its outputs (`Logits`), until a loss takes them in tiles.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gradaccum.on_torch.batch import leaves, map_leaves
from gradaccum.on_torch.private import casts_outputs, sharded_groups

logger = logging.getLogger("gradaccum")

_TILED = "TiledLinear"
"""The class of a head, meanwhile."""
NUMBERS = 1 << 24
"""Logits of a tile: 64 MiB in float32."""


class Logits:
    """The outputs of a linear layer that have not been computed.

    They can be sliced, flattened, transposed and cast, and `cross_entropy` takes them in tiles. Whatever else is done
    with them, they are computed for it, and `warn` hears for what.
    """

    requires_grad = True

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, warn: Callable[[str], None]) -> None:
        self._x, self._weight, self._bias, self._warn = x, weight, bias, warn
        self._dtypes: tuple[torch.dtype, ...] = ()
        """What they are cast to, one after the other."""
        self._second = False
        """Whether the classes are the second dimension, not the last."""
        self._whole: Any = None

    def _like(self, **changed: Any) -> Logits:
        new = object.__new__(Logits)
        vars(new).update({**vars(self), "_whole": None, **changed})
        return new

    def whole(self, what: str) -> Any:
        if self._whole is None:
            self._warn(what)
            logits = self._cast(F.linear(self._x, self._weight, self._bias))
            self._whole = logits.movedim(-1, 1) if self._second else logits
        return self._whole

    def _cast(self, logits: Tensor) -> Tensor:
        for dtype in self._dtypes:
            logits = logits.to(dtype)
        return logits

    @property
    def shape(self) -> torch.Size:
        first, classes = self._x.shape[:-1], len(self._weight)
        return torch.Size([first[0], classes, *first[1:]] if self._second else [*first, classes])

    dtype = property(lambda self: self._dtypes[-1] if self._dtypes else self._weight.dtype)
    device = property(lambda self: self._x.device)
    is_cuda = property(lambda self: self._x.is_cuda)
    ndim = property(lambda self: self._x.ndim)
    mT = property(lambda self: self.transpose(-2, -1))

    def dim(self) -> int:
        return self._x.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def contiguous(self) -> Logits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """In another dtype; on another device they have to be computed."""
        dtype = kwargs.get("dtype", args[0] if args else None)
        if len(args) + len(kwargs) == 1 and isinstance(dtype, torch.dtype):
            return self._like(_dtypes=(*self._dtypes, dtype))
        if len(args) == 1 and not kwargs and args[0] in (self.device, str(self.device)):
            return self
        return self.whole("to").to(*args, **kwargs)

    def float(self) -> Logits:
        return self.to(torch.float32)

    def double(self) -> Logits:
        return self.to(torch.float64)

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self._second or not sizes or sizes[-1] != len(self._weight):
            return self.whole("view").reshape(*shape)
        return self._like(_x=self._x.reshape(*sizes[:-1], self._x.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self._second or end_dim % self.ndim == self.ndim - 1:
            return self.whole("flatten").flatten(start_dim, end_dim)
        return self._like(_x=self._x.flatten(start_dim, end_dim))

    def transpose(self, one: int, other: int) -> Any:
        if self.ndim == 3 and {one % 3, other % 3} == {1, 2}:
            return self._like(_second=not self._second)
        return self.whole("transpose").transpose(one, other)

    def __getitem__(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(place, slice) for place in places if place is not ...)
        if ... in places:
            at = places.index(...)
            places = (*places[:at], *[slice(None)] * (self.ndim - len(places) + 1), *places[at + 1 :])
        all_classes = len(places) < self.ndim or places[-1] == slice(None)
        if not plain or not all_classes or self._second or len(places) > self.ndim:
            return self.whole("indexing")[index]
        return self._like(_x=self._x[places[: self.ndim - 1]])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of a function of torch that is given some."""
        kwargs = kwargs or {}
        loss = _cross_entropy(*args, **kwargs) if func is F.cross_entropy else None
        if loss is not None:
            return loss
        name = getattr(func, "__name__", str(func))
        return func(*computed(args, name), **computed(kwargs, name))


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: Logits, *others: Any) -> Any:
        what = f"operator.{name}"
        return getattr(self.whole(what), f"__{name}__")(*computed(others, what))

    return compute


for _name in (
    *("add", "sub", "mul", "truediv", "pow", "matmul", "neg", "lt", "le", "gt", "ge", "abs"),
    *("radd", "rsub", "rmul", "rtruediv", "rpow", "rmatmul"),
):
    setattr(Logits, f"__{_name}__", _operator(_name))


def computed(tree: Any, what: str) -> Any:
    """A tree with logits that stand for theirs computed, as they are needed for `what`."""
    if type(tree) is Tensor or not any(isinstance(leaf, Logits) for _, leaf in leaves(tree)):
        return tree
    return map_leaves(lambda leaf: leaf.whole(what) if isinstance(leaf, Logits) else leaf, tree)


def _cross_entropy(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss, in tiles; None where that isn't possible."""
    if not isinstance(logits, Logits) or size_average is not None or reduce is not None:
        return None
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != logits._x.shape[:-1]:
        return None
    if logits.ndim < 2 or (logits.ndim > 2 and not logits._second):
        return None
    # Without a second dimension of its own, each number of the target is one row.
    x, rows = logits._x.flatten(0, -2), target.flatten()
    if reduction not in ("none", "mean", "sum") or not len(rows) or logits._whole is not None:
        return None
    if torch.is_autocast_enabled(x.device.type) and logits.dtype != torch.float64:
        logits = logits.float()
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def of_tile(tile: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(logits._cast(tile), classes, **options, reduction="none")

    losses = cross_entropies(x, logits._weight, logits._bias, rows, of_tile)
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    counts = rows != ignore_index
    if weight is None:
        return losses.sum() / counts.sum().to(losses.dtype)
    return losses.sum() / weight[rows.masked_fill(~counts, 0)].mul(counts).sum()


# The module.


def tiling(model: nn.Module, head: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context for forward passes in which this head's logits come in tiles; an empty one for None.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9))
        >>> with tiling(model, "1")():
        ...     type(model(torch.randn(3, 4))).__name__
        'Logits'
    """
    if head is None:
        return contextlib.nullcontext
    layer: Any = _found(model, head)
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        raise TypeError(
            "`head` must be an nn.Linear with its own forward, whose outputs are the logits. Received: "
            f"{layer!r} of type {type(layer).__name__}."
        )
    if all(module is not layer for module in model.modules()):
        raise ValueError("`head` must be a module of the model. Received: a layer that isn't.")
    casts, own, warned = casts_outputs(model), [*layer.parameters()], list[str]()
    groups = [] if casts else [group for group in sharded_groups(model) if any(map(group.holds, own))]

    def warn_once(what: str) -> None:
        if not warned:
            warned.append(what)
            logger.warning(
                "head: all logits of a micro-batch are computed at once, for %r. Only cross_entropy with classes as "
                "targets takes tiles, after slices, reshape, transpose and casts.",
                what,
            )

    def forward(layer: Any, x: Tensor) -> Any:
        weight, bias = layer.weight, layer.bias
        plain = type(weight) in (Tensor, nn.Parameter) and type(x) is Tensor
        if casts or not plain or torch.compiler.is_compiling():  # sharded otherwise, or parametrized
            warn_once("output_dtype" if casts else "another type of tensors")
            return F.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as linear does it
            narrow = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        return Logits(x, weight, bias, warn_once)

    return functools.partial(_tiled, layer, forward, groups)


@contextlib.contextmanager
def _tiled(layer: Any, forward: Callable[..., Any], groups: Sequence[Any]) -> Iterator[None]:
    own = type(layer)
    # A class of its own rather than an attribute, since copies of the model are to compute with their weights.
    layer.__class__ = own if own.__name__ == _TILED else type(_TILED, (own,), {"forward": forward})
    try:
        with contextlib.ExitStack() as stack:
            for group in groups:  # the loss takes their weights later
                stack.enter_context(group.staying_gathered())
            yield
    finally:
        layer.__class__ = own


def _found(model: nn.Module, head: Any) -> nn.Module:
    if isinstance(head, nn.Module):
        return head
    if not isinstance(head, str):
        raise TypeError(
            '`head` must be a module of the model, its dotted path, or "auto". Received: '
            f"{head!r} of type {type(head).__name__}."
        )
    if head != "auto":
        try:
            return model.get_submodule(head)
        except AttributeError:
            raise ValueError(
                f"The model has no module {head!r}. `head` is the module whose outputs are logits."
            ) from None
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    if not isinstance(layer, nn.Module):
        raise ValueError(
            f'head="auto" finds the head of transformers\' models. Received: {type(model).__name__}. Name it, as in '
            'head="lm_head".'
        )
    return layer


# Tiles.


def _tiles(rows: int, classes: int) -> list[slice]:
    size = max(NUMBERS // classes, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, losses: Any) -> Tensor:
        ctx.save_for_backward(x, weight, bias, target)
        ctx.losses = losses
        with torch.autocast(x.device.type, enabled=False):
            tiles = _tiles(len(x), len(weight))
            return torch.cat([losses(F.linear(x[tile], weight, bias), target[tile]) for tile in tiles])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        # Sums over tiles, in float32 where one product would have added up in it.
        wide = torch.float32 if weight.dtype.itemsize == 2 else weight.dtype
        for_x = torch.empty_like(x) if of_x else None
        for_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if of_weight else None
        for_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if of_bias else None
        with torch.autocast(x.device.type, enabled=False):
            for tile in _tiles(len(x), len(weight)):
                logits = F.linear(x[tile], weight, bias).requires_grad_()
                with torch.enable_grad():
                    losses = ctx.losses(logits, target[tile])
                (slope,) = torch.autograd.grad(losses, logits, gradient[tile])
                if for_x is not None:
                    torch.mm(slope, weight, out=for_x[tile])
                if for_weight is not None and wide is weight.dtype:
                    for_weight.addmm_(slope.T, x[tile])
                elif for_weight is not None:
                    for_weight += slope.T @ x[tile]
                if for_bias is not None:
                    for_bias += slope.sum(0, dtype=wide)
        for_weight = None if for_weight is None else for_weight.to(weight.dtype)
        return for_x, for_weight, None if for_bias is None else for_bias.to(bias.dtype), None, None


cross_entropies: Callable[..., Tensor] = _CrossEntropies.apply
"""Losses of each row, in tiles: `(x, weight, bias, target, losses)` with `losses(logits, target)`."""
