"""What stands for the outputs of a head until a loss takes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradaccum.torch.head.tiles import Options, cross_entropies

__all__ = ["Logits"]


class Logits:
    """The outputs of a linear layer that have not been computed.

    They can be sliced, flattened, transposed and cast, and `cross_entropy` takes them in tiles. Whatever else is done
    with them, they are computed for it.

    Example:
        >>> logits = Logits(torch.randn(2, 3, 4), torch.randn(9, 4), None)
        >>> logits[:, :-1].float().shape, logits.view(-1, 9).shape
        (torch.Size([2, 2, 9]), torch.Size([6, 9]))
        >>> F.cross_entropy(logits.transpose(1, 2), torch.ones(2, 3).long()).shape
        torch.Size([])
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtypes: tuple[torch.dtype, ...] = (),
        second: bool = False,
        computed: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._x, self._weight, self._bias = x, weight, bias
        self._dtypes, self._second, self._computed = dtypes, second, computed
        self._whole: Tensor | None = None

    def _like(self, x: Tensor, dtypes: tuple[torch.dtype, ...] | None = None, second: bool | None = None) -> Logits:
        return Logits(
            x,
            self._weight,
            self._bias,
            self._dtypes if dtypes is None else dtypes,
            self._second if second is None else second,
            self._computed,
        )

    def whole(self, what: str) -> Tensor:
        """The outputs, computed."""
        if self._whole is None:
            self._computed(what)
            logits = F.linear(self._x, self._weight, self._bias)
            for dtype in self._dtypes:
                logits = logits.to(dtype)
            self._whole = logits.movedim(-1, 1) if self._second else logits
        return self._whole

    @property
    def shape(self) -> torch.Size:
        """That of the outputs."""
        before = self._x.shape[:-1]
        classes = len(self._weight)
        return torch.Size([before[0], classes, *before[1:]] if self._second else [*before, classes])

    @property
    def dtype(self) -> torch.dtype:
        """That of the outputs."""
        return self._dtypes[-1] if self._dtypes else self._weight.dtype

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self._x.device

    @property
    def ndim(self) -> int:
        """Of the outputs."""
        return self._x.ndim

    requires_grad = True
    is_cuda = property(lambda self: self._x.is_cuda)

    def dim(self) -> int:
        """Of the outputs."""
        return self._x.ndim

    def size(self, dim: int | None = None) -> Any:
        """Of the outputs."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Logits:
        """They are."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """In another dtype; on another device they have to be computed."""
        dtype = kwargs.get("dtype", args[0] if args else None)
        if len(args) + len(kwargs) == 1 and isinstance(dtype, torch.dtype):
            return self._like(self._x, (*self._dtypes, dtype))
        if len(args) == 1 and not kwargs and args[0] in (self.device, str(self.device)):
            return self
        return self.whole("to").to(*args, **kwargs)

    def float(self) -> Logits:
        """In float32."""
        return self._like(self._x, (*self._dtypes, torch.float32))

    def double(self) -> Logits:
        """In float64."""
        return self._like(self._x, (*self._dtypes, torch.float64))

    def view(self, *shape: Any) -> Any:
        """Flat, if the classes stay the last dimension."""
        return self._reshaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        """Flat, if the classes stay the last dimension."""
        return self._reshaped("reshape", shape)

    def _reshaped(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self._second or not sizes or sizes[-1] != len(self._weight):
            return getattr(self.whole(name), name)(*shape)
        return self._like(self._x.reshape(*sizes[:-1], self._x.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flat, if the classes stay the last dimension."""
        if self._second or end_dim % self.ndim == self.ndim - 1:
            return self.whole("flatten").flatten(start_dim, end_dim)
        return self._like(self._x.flatten(start_dim, end_dim))

    def transpose(self, one: int, other: int) -> Any:
        """With the classes second, if they are exchanged with the last of three dimensions."""
        if self.ndim == 3 and {one % 3, other % 3} == {1, 2}:
            return self._like(self._x, second=not self._second)
        return self.whole("transpose").transpose(one, other)

    @property
    def mT(self) -> Any:  # PyTorch's name
        """The same."""
        return self.transpose(-2, -1)

    def __getitem__(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(place, slice) for place in places if place is not ...)
        if ... in places:
            at = places.index(...)
            places = (*places[:at], *[slice(None)] * (self.ndim - len(places) + 1), *places[at + 1 :])
        every = len(places) < self.ndim or places[-1] == slice(None)
        if not plain or not every or self._second or len(places) > self.ndim:
            return self.whole("indexing")[index]
        return self._like(self._x[places[: self.ndim - 1]])

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of a function of torch that is given some."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        name = getattr(func, "__name__", str(func))
        return func(*_computed(args, name), **_computed(kwargs, name))


def _computed(tree: Any, name: str) -> Any:
    if isinstance(tree, Logits):
        return tree.whole(name)
    if isinstance(tree, dict):
        return {key: _computed(value, name) for key, value in tree.items()}
    return type(tree)(_computed(value, name) for value in tree) if type(tree) in (list, tuple) else tree


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
    x, rows, dtypes = logits._x.flatten(0, -2), target.flatten(), logits._dtypes
    if reduction not in ("none", "mean", "sum") or not len(rows) or logits._whole is not None:
        return None
    if torch.is_autocast_enabled(x.device.type) and logits.dtype != torch.float64:
        dtypes = (*dtypes, torch.float32)
    options = Options(weight, ignore_index, label_smoothing, dtypes)
    losses = cross_entropies(x, logits._weight, logits._bias, rows, options)
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    counts = rows != ignore_index
    if weight is None:
        return losses.sum() / counts.sum().to(losses.dtype)
    return losses.sum() / weight[rows.masked_fill(~counts, 0)].mul(counts).sum()


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: Logits, *others: Any) -> Any:
        return getattr(operator, name)(self.whole(f"operator.{name}"), *_computed(others, name))

    return compute


def _reflected(name: str) -> Callable[..., Any]:
    def compute(self: Logits, other: Any) -> Any:
        return getattr(operator, name)(other, self.whole(f"operator.{name}"))

    return compute


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(Logits, f"__{_name}__", _operator(_name))
    setattr(Logits, f"__r{_name}__", _reflected(_name))
for _name in ("neg", "lt", "le", "gt", "ge", "abs"):
    setattr(Logits, f"__{_name}__", _operator(_name))
