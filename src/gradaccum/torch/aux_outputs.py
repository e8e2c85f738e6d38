"""`TrainStep(has_aux=True)`: what a loss returns beside itself, put together over the micro-batches of a batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.sizes import Slice
from gradaccum.on_torch.batch import Batch, children, leaves, map_leaves
from gradaccum.torch.loss import BatchLosses, Objective, Weight, WeightedLoss
from gradaccum.torch.train_step.passes import TrainPasses


class Rows:
    """A row for every row of the batch, in the batch's order."""

    def __init__(self, path: str, batch: Batch, dim: int) -> None:
        self._path, self._rows, self._order, self._dim = path, batch.rows, batch.order, dim
        self._tensor: Tensor | None = None

    def add(self, value: Any, piece: Slice, weight: Weight) -> None:
        if not _has_rows(value, piece, self._dim):
            raise ValueError(_no_rows(self._path, value, piece))
        if self._tensor is None:
            shape = [*value.shape]
            shape[self._dim] = self._rows
            self._tensor = value.new_empty(shape)
        expected, shape = [*self._tensor.shape], [*value.shape]
        expected[self._dim] = shape[self._dim]
        if expected != shape or value.dtype != self._tensor.dtype:
            raise ValueError(
                f"{self._path} has rows of other shapes or dtypes in other micro-batches: {tuple(shape)}, "
                f"{value.dtype}, after {tuple(expected)}, {self._tensor.dtype}. Return something of one shape for each "
                'row, or say otherwise in `aux=`, such as aux="last".'
            )
        rows = piece.rows
        places = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else torch.tensor(rows)
        places = places if self._order is None else self._order[places]
        self._tensor.index_copy_(self._dim, places.to(value.device), value)

    def result(self) -> Any:
        return self._tensor


class Sum:
    """Added up, in float64 or int64."""

    def __init__(self, path: str, *_: Any) -> None:
        self._path = path
        self._sum: Tensor | None = None
        self._are_numbers = True

    def add(self, value: Any, piece: Slice, weight: Weight) -> None:
        value = self._checked(value)
        wide = torch.float64 if _is_inexact(value.dtype) else torch.int64
        self._add(value.to(torch.promote_types(value.dtype, wide)))

    def _checked(self, value: Any) -> Tensor:
        if not _is_number(value) and not isinstance(value, Tensor):
            raise TypeError(
                f"{self._path} is neither a tensor nor a number, which alone can be added up or averaged. Received: "
                f'{value!r:.100} of type {type(value).__name__}. Give aux="last" for it, or leave it out.'
            )
        self._are_numbers = self._are_numbers and not isinstance(value, Tensor)
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=_dtype_of_number(value))
        self._dtype = tensor.dtype
        return tensor

    def _add(self, value: Tensor) -> None:
        if self._sum is not None and self._sum.shape != value.shape:
            raise ValueError(
                f"{self._path} has other shapes in other micro-batches: {tuple(value.shape)} after "
                f'{tuple(self._sum.shape)}. Give aux="concat" for what has rows, or aux="last".'
            )
        self._sum = value.clone() if self._sum is None else self._sum + value

    def result(self) -> Any:
        assert self._sum is not None
        if self._are_numbers:
            return self._sum.item()
        return self._sum.to(self._dtype) if _is_inexact(self._dtype) else self._sum


class Mean(Sum):
    """Averaged, each micro-batch by what its loss is a mean over."""

    def __init__(self, path: str, *_: Any) -> None:
        super().__init__(path)
        self._total: Weight = 0.0

    def add(self, value: Any, piece: Slice, weight: Weight) -> None:
        value = self._checked(value)
        value = value.to(torch.promote_types(value.dtype, torch.float64))
        if isinstance(weight, Tensor):
            weight = weight.to(value.device, torch.float64)
            value = torch.where(weight > 0, value, 0.0) * weight
        else:  # a mean over nothing is NaN
            value = value * weight if weight else torch.zeros_like(value)
        self._add(value)
        self._total = self._total + weight

    def result(self) -> Any:
        assert self._sum is not None
        mean = self._sum / self._total if isinstance(self._total, Tensor) or self._total else self._sum * float("nan")
        if self._are_numbers:
            return mean.item()
        return mean.to(self._dtype if _is_inexact(self._dtype) else torch.get_default_dtype())


class Last:
    """That of the micro-batch that ran last."""

    def __init__(self, path: str, *_: Any) -> None:
        self._value: Any = None

    def add(self, value: Any, piece: Slice, weight: Weight) -> None:
        self._value = value.clone() if isinstance(value, Tensor) else value

    def result(self) -> Any:
        return self._value


_WAYS: dict[str, Any] = {"concat": Rows, "mean": Mean, "sum": Sum, "last": Last}
_CHOICES = ("auto", *_WAYS)


def checked_aux(aux: Any) -> Any:
    for path, choice in leaves(aux):
        if not isinstance(choice, str) or choice not in _CHOICES:
            raise ValueError(
                f"`aux` must be one of {', '.join(map(repr, _CHOICES))}, or a container of these that is a prefix of "
                f"the aux's structure. Received: aux{path}={choice!r}."
            )
    return aux


def _choices(tree: Any, aux: Any, path: str = "aux") -> Iterator[tuple[str, str]]:
    """The choice for each leaf, by its path."""
    wanted, inside = children(aux), children(tree)
    if wanted is None:
        yield from ((where, aux) for where, _ in leaves(tree, path))
        return
    if inside is None or sorted(str(key) for _, key, _ in wanted) != sorted(str(key) for _, key, _ in inside):
        raise ValueError(
            f"`aux` must be a prefix of the structure that the loss returns. Received: aux={aux!r} for {path} of type "
            f"{type(tree).__name__}" + ("." if inside is None else f" with {[key for _, key, _ in inside]}.")
        )
    by_key = {key: choice for _, key, choice in wanted}
    for suffix, key, child in inside:
        yield from _choices(child, by_key[key], path + suffix)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _dtype_of_number(value: Any) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _has_rows(value: Any, piece: Slice, dim: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == piece.size and piece.packs is None


def _no_rows(path: str, value: Any, piece: Slice) -> str:
    received = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:100]
    packed = ", which `pack` has joined" if piece.packs is not None else ""
    return (
        f"{path} has no row for each of the {piece.size} rows of its micro-batch{packed}. Received: {received} of type "
        f"{type(value).__name__}. Say what becomes of it over micro-batches: "
        'aux="mean", "sum" or "last", or a container with one of these for each part of the aux.'
    )


class Collector:
    """Keeps what the latest evaluation of the loss has returned beside it, and puts together those of a window."""

    def __init__(self, aux: Any, dim: int) -> None:
        self._aux, self._dim = checked_aux(aux), dim
        self.latest: Any = None
        self._parts: dict[str, Any] | None = None
        self._tree: Any = None

    def __deepcopy__(self, memo: Any) -> Collector:
        """A proof's copy, which shares nothing."""
        return Collector(self._aux, self._dim)

    def keep(self, aux: Any) -> None:
        self.latest = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, aux)

    def called(self, model: Callable[[Any], Any], inputs: Any) -> Any:
        outputs = model(inputs)
        self.keep(outputs)
        return outputs

    def open(self) -> None:
        """A window begins, or begins once more."""
        self.latest = self._parts = self._tree = None

    def take(self) -> Any:
        aux, self.latest = self.latest, None
        return aux

    def add(self, aux: Any, batch: Batch, piece: Slice, weight: Weight) -> None:
        found = dict(leaves(aux, "aux"))
        if self._parts is None:
            self._parts = {
                path: self._part(path, choice, found[path], batch, piece) for path, choice in _choices(aux, self._aux)
            }
            parts = iter(self._parts.values())
            self._tree = map_leaves(lambda _: next(parts), aux)
        if found.keys() != self._parts.keys():
            raise ValueError(
                "What the loss returns beside itself must have one structure in all micro-batches. Received: "
                f"{[*found]} after {[*self._parts]}."
            )
        for path, value in found.items():
            self._parts[path].add(value, piece, weight)

    def _part(self, path: str, choice: str, value: Any, batch: Batch, piece: Slice) -> Any:
        if choice == "auto":
            if _is_number(value) or (isinstance(value, Tensor) and not value.dim()):
                choice = "mean"
            elif value is None:
                choice = "last"
            elif _has_rows(value, piece, self._dim):
                choice = "concat"
            else:
                raise ValueError(_no_rows(path, value, piece))
        return _WAYS[choice](path, batch, self._dim)

    def finished(self) -> Any:
        """The large batch's; None of a rank that has no rows."""
        return None if self._parts is None else map_leaves(lambda part: part.result(), self._tree)


class AuxObjective(Objective):
    """An objective whose `compute_loss` returns an aux beside the loss; that of a `loss_fn` is the model's outputs."""

    def __init__(self, model: Any, *, aux: Any, **keywords: Any) -> None:
        super().__init__(model, **keywords)
        dims = self.batch_dims
        self.collector = Collector(aux, dims if isinstance(dims, int) and dims > 0 else 0)

    def _result(self, batch: tuple[Any, ...], summed: bool) -> Any:
        if self.compute_loss is None:
            plain = copy.copy(self)
            plain.model = functools.partial(self.collector.called, self.model)  # type: ignore[assignment]  # callable
            return super(AuxObjective, plain)._result(batch, summed)
        result = self.compute_loss(self.model, *batch)
        if type(result) is not tuple or len(result) not in (2, 3):
            received = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise TypeError(
                "With has_aux=True, `compute_loss` must return (loss, aux) or (loss, weight, aux). "
                f"Received: {received}."
            )
        self.collector.keep(result[-1])
        return result[0] if len(result) == 2 else result[:2]


class AuxPasses(TrainPasses):
    """Passes that collect what each micro-batch returns beside its loss, once its backward pass is done."""

    def __init__(self, runner: Any, window: BatchLosses, batch: Batch) -> None:
        super().__init__(runner, window, batch)
        window.shares = True
        self._collector: Collector = runner.objective.collector
        self._collector.open()

    def forward(self, piece: Slice) -> WeightedLoss:
        weighted = super().forward(piece)
        self._latest = self._collector.take()
        return weighted

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        super().backward(piece, weighted)
        aux, self._latest = self._latest, None
        self._collector.add(aux, self.batch, piece, self._weight(piece, weighted))

    def _weight(self, piece: Slice, weighted: WeightedLoss) -> Weight:
        """What the loss of a micro-batch is a mean over; rows, where there are several losses or nothing says."""
        if self.window.named:
            return float(piece.size)
        if weighted.told is not None:
            return weighted.told
        if not weighted.parts:
            return 0.0
        return float(piece.size) if weighted.share is None else weighted.share


def with_aux(call: Callable[..., Tensor], collector: Collector, *arguments: Any, **keywords: Any) -> tuple[Tensor, Any]:
    """What a step returns: the loss and the aux."""
    try:
        loss = call(*arguments, **keywords)
        return loss, collector.finished()
    finally:
        collector.open()  # an error holds no memory
