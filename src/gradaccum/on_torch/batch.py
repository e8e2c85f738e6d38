"""Batches as users have them: tensors nested in tuples, lists, dicts, named tuples and dataclasses.

A *leaf* is whatever is none of these containers. Leaves that are tensors (or arrays) of at least one dimension carry
rows; all others are shared by every micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

BatchDims = Any
"""Like `torch.vmap`'s `in_dims`: an int (the dimension that holds the rows), None (shared), or a container of these
that is a prefix of the batch's structure."""


def children(node: Any) -> list[tuple[str, Any, Any]] | None:
    """`(path suffix, key, child)` of a container, in order; None for a leaf."""
    if isinstance(node, (torch.Tensor, PackedSequence)):  # the most frequent leaf; and one that looks like a tuple
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", key, node[key]) for key in node]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", index, node[index]) for index, name in enumerate(node._fields)]
    if isinstance(node, (tuple, list)) and not isinstance(node, torch.Size):
        return [(f"[{index}]", index, child) for index, child in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def rebuild(node: Any, values: list[Any]) -> Any:
    if isinstance(node, Mapping):
        pairs = dict(zip(node, values, strict=True))
        if isinstance(node, dict) and dataclasses.is_dataclass(node):  # transformers' ModelOutput is both
            return type(node)(**pairs)
        new = copy.copy(node)
        try:
            for key, value in pairs.items():
                new[key] = value  # type: ignore[index]
        except TypeError:  # an immutable mapping
            return type(node)(pairs)  # type: ignore[call-arg]
        return new
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, (tuple, list)):
        return type(node)(values)
    new = copy.copy(node)
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(new, field.name, value)  # frozen ones too
    return new


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inside = children(tree)
    if inside is None:
        yield path, tree
    else:
        for suffix, _, child in inside:
            yield from leaves(child, path + suffix)


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree of the same structure with `function(leaf, *leaves of the others)` in place of each leaf."""
    inside = children(tree)
    if inside is None:
        return function(tree, *others)
    beside = [children(other) for other in others]
    if any(other is None or len(other) != len(inside) for other in beside):
        raise ValueError(f"Structures differ: {type(tree).__name__} against {[type(o).__name__ for o in others]}.")
    values = [
        map_leaves(function, child, *(other[index][2] for other in beside if other is not None))
        for index, (_, _, child) in enumerate(inside)
    ]
    return rebuild(tree, values)


def has_rows(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0


def with_dims(tree: Any, batch_dims: BatchDims = 0, path: str = "") -> Iterator[tuple[str, Any, int | None]]:
    """Every leaf with its path and the dimension that holds its rows; None where every micro-batch shares it."""
    inside = children(tree)
    if batch_dims is None or (isinstance(batch_dims, int) and not isinstance(batch_dims, bool)):
        yield from ((where, leaf, _dim_of(where, leaf, batch_dims)) for where, leaf in leaves(tree, path))
        return
    dims = children(batch_dims)
    if dims is None or inside is None or [key for _, key, _ in dims] != [key for _, key, _ in inside]:
        raise ValueError(
            f"`batch_dims` must be an int, None, or a prefix of the batch's structure. Received: {batch_dims!r} "
            f"for {path or 'a batch'} of type {type(tree).__name__}"
            + (f" with {[key for _, key, _ in inside]}." if inside is not None else ".")
        )
    for (suffix, _, child), (_, _, dim) in zip(inside, dims, strict=True):
        yield from with_dims(child, dim, path + suffix)


def _dim_of(where: str, leaf: Any, dim: int | None) -> int | None:
    if dim is None:
        return None
    if isinstance(leaf, PackedSequence):
        raise ValueError(
            f"A PackedSequence cannot be cut into rows. Received: batch{where}. Give the padded sequences and their "
            "lengths, and pack them in the model."
        )
    if not has_rows(leaf):
        return None
    if not -len(leaf.shape) <= dim < len(leaf.shape):
        raise ValueError(
            f"`batch_dims` says dimension {dim} for {where or 'the batch'}, whose shape is {tuple(leaf.shape)}."
        )
    return dim % len(leaf.shape)


def described(tree: Any, batch_dims: BatchDims = 0) -> list[tuple[str, Any, int | None]]:
    """What `with_dims` yields, listed; at once for a single tensor, which outputs mostly are."""
    if type(tree) is torch.Tensor and type(batch_dims) is int and batch_dims == 0 and tree.dim():
        return [("", tree, 0)]
    return list(with_dims(tree, batch_dims))


_FEW = 16
_PATHS, _IN_FRONT = tuple([f"[{index}]" for index in range(_FEW)]), (0,) * _FEW


def _is_flat(tree: Any, batch_dims: BatchDims) -> bool:
    if type(tree) is not tuple or type(batch_dims) is not int or batch_dims or len(tree) > _FEW:
        return False
    return all([type(leaf) is torch.Tensor and leaf.ndim > 0 for leaf in tree])


class Batch:
    """A batch and where its rows are: what there is to find out about it is found out once.

    Example:
        >>> batch = Batch((torch.arange(6), "shared"))
        >>> batch.rows, batch.take(slice(2, 4)).tree
        (6, (tensor([2, 3]), 'shared'))
    """

    flat = False
    """Whether it is known to be a tuple of tensors with their rows in front: the usual batch, which takes no walk."""
    order: torch.Tensor | None = None
    """Where its rows stood before those of groups were brought together; None where that is where they are."""

    def __init__(
        self, tree: Any, batch_dims: BatchDims = 0, rows: int | None = None, groups: torch.Tensor | None = None
    ) -> None:
        self.tree, self.batch_dims, self.groups = tree, batch_dims, groups
        if rows is not None:
            self.rows = rows
        elif _is_flat(tree, batch_dims):  # found out all at once, as each update asks
            self.flat, self.leaves = True, list(zip(_PATHS, tree, _IN_FRONT))
            self.signature = [(leaf.shape, leaf.dtype) for leaf in tree]
            lengths = [leaf.shape[0] for leaf in tree]
            if lengths and lengths.count(lengths[0]) == len(lengths):
                self.rows = lengths[0]

    @functools.cached_property
    def described(self) -> list[tuple[str, Any, int | None]]:
        """Every leaf: path, leaf, and the dimension that holds its rows, None where every micro-batch shares it."""
        return described(self.tree, self.batch_dims)

    @functools.cached_property
    def leaves(self) -> list[tuple[str, Any, int]]:
        """Those that have rows."""
        return [(path, leaf, dim) for path, leaf, dim in self.described if dim is not None]

    @functools.cached_property
    def signature(self) -> list[Any]:
        """What batches of the same kind have in common: paths, shapes and dtypes of what has rows, or these alone."""
        return [(path, leaf.shape, leaf.dtype, dim) for path, leaf, dim in self.leaves]

    @functools.cached_property
    def rows(self) -> int:
        if not self.leaves:
            raise ValueError(f"This batch of type {type(self.tree).__name__} has no tensor with rows.")
        rows = {int(leaf.shape[dim]) for _, leaf, dim in self.leaves}
        if len(rows) > 1:
            listing = "".join(
                f"\n  batch{path}  shape {tuple(leaf.shape)}, {leaf.shape[dim]} rows in dimension {dim}"
                for path, leaf, dim in self.leaves
            )
            raise ValueError(
                f"The tensors of a batch must have the same number of rows.{listing}\n"
                "Mark what every micro-batch shares with None in `batch_dims`, as in torch.vmap's `in_dims`."
            )
        return rows.pop()

    def ends(self, leaf: torch.Tensor) -> tuple[float, float]:
        known: dict[Any, tuple[float, float]] = vars(self).setdefault("_ends", {})
        found = id(leaf), 0 if leaf.is_inference() else leaf._version
        if found not in known:
            least, most = leaf.aminmax()
            known[found] = least.item(), most.item()
        return known[found]

    def take(self, rows: slice | torch.Tensor) -> Batch:
        if isinstance(rows, slice):
            taken = (rows.stop if rows.stop < self.rows else self.rows) - rows.start
            groups = None if self.groups is None else self.groups[rows]
            if self.flat:
                new = Batch(tuple([leaf[rows] for leaf in self.tree]), 0, taken, groups)
                new.flat = True
                return new
        else:
            taken, groups = len(rows), None if self.groups is None else self.groups[rows.cpu()]
            if self.flat:
                return Batch(tuple([leaf.index_select(0, rows.to(leaf.device)) for leaf in self.tree]), 0, None, groups)
        dims = iter([dim for _, _, dim in self.described])

        def pick(leaf: Any) -> Any:
            if (dim := next(dims)) is None:
                return leaf
            if isinstance(rows, slice):
                return leaf[(slice(None),) * dim + (rows,)]
            if not isinstance(leaf, torch.Tensor):  # an array
                return leaf.take(rows.tolist(), axis=dim)
            return leaf.index_select(dim, rows.to(leaf.device))

        return Batch(map_leaves(pick, self.tree), self.batch_dims, taken, groups)

    def units(self) -> list[torch.Tensor]:
        """The rows that stay together: each by itself, or those of each group."""
        order = torch.arange(self.rows)
        if self.groups is None:
            return list(order.split(1))
        _, sizes = self.groups.unique_consecutive(return_counts=True)
        return list(order.split(sizes.tolist()))

    def map(self, function: Callable[[Any], Any]) -> Batch:
        if self.flat:
            return Batch(tuple([function(leaf) for leaf in self.tree]), 0, None, self.groups)
        return self.like(map_leaves(function, self.tree))

    def like(self, tree: Any) -> Batch:
        new = copy.copy(self)
        new.tree = tree
        for found in ("flat", "described", "leaves", "signature", "_ends"):
            vars(new).pop(found, None)
        return new


def number_of_rows(batch: Any, batch_dims: BatchDims = 0) -> int:
    return Batch(batch, batch_dims).rows


def take(batch: Any, rows: slice | torch.Tensor, batch_dims: BatchDims = 0) -> Any:
    return Batch(batch, batch_dims).take(rows).tree


def concatenate(parts: Sequence[Any], batch_dims: BatchDims = 0) -> Any:
    """The batch whose rows are those of the parts, in order. Leaves without rows must be the same in all parts."""
    dims = iter(described(parts[0], batch_dims))

    def join(*pieces: Any) -> Any:
        path, first, dim = next(dims)
        if dim is None:
            if not all(piece is first or _same(piece, first) for piece in pieces):
                raise ValueError(
                    f"{path or 'The output'} carries no rows, so it must be the same for every micro-batch. Received: "
                    f"{first!r} of type {type(first).__name__}, and {next(p for p in pieces if not _same(p, first))!r}."
                )
            return first
        shapes = {(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces}
        if len(shapes) > 1:
            raise ValueError(
                f"{path or 'The output'} has rows of different shapes in different micro-batches: "
                f"{[tuple(piece.shape) for piece in pieces]}, rows in dimension {dim}."
            )
        return torch.cat(pieces, dim)

    return map_leaves(join, *parts)


def _same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(
            (one == other).all() if isinstance(one, torch.Tensor) else one == other
        )
    except (TypeError, ValueError, RuntimeError):  # what can't be compared
        return False


def read_later(number: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A number of a device on the host, and what tells when it has arrived there."""
    host = torch.empty_like(number, device="cpu", pin_memory=True)
    host.copy_(number, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def read_early(number: Any) -> Any:
    """A function that returns a number which a device holds: it is on its way from now on, so nobody waits for it."""
    if not (isinstance(number, torch.Tensor) and number.is_cuda):
        return float(number)
    host, event = read_later(number)

    def read() -> float:
        event.synchronize()
        return float(host)

    return read
