"""Inputs and outputs as trees: their tensors taken out, and put back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import BatchDims, children, has_rows, leaves, map_leaves
from gradaccum.on_torch.state import same

__all__ = [
    "Inputs",
    "Samples",
    "as_leaf",
    "by_name",
    "copied",
    "dims_by_name",
    "is_floating",
    "tensors_of",
    "with_tensors",
    "without_tensors",
]


class Inputs(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def by_name(inputs: Inputs, signature: inspect.Signature, name: str) -> Inputs:
    """The same inputs, all of them by name, where the one of that name was given by its position.

    Example:
        >>> by_name(Inputs((1, 2), {}), inspect.signature(lambda ids, mask: None), "mask")
        Inputs(args=(), kwargs={'ids': 1, 'mask': 2})
    """
    names = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][: len(inputs.args)]
    if name not in names or len(names) < len(inputs.args):
        return inputs
    return Inputs((), {**dict(zip(names, inputs.args, strict=True)), **inputs.kwargs})


def dims_by_name(dims: BatchDims, inputs: Inputs, module: nn.Module) -> BatchDims:
    """`batch_dims`, which users give for positional arguments or by name, as a prefix of the inputs."""
    if dims is None or isinstance(dims, int):
        return dims
    if not isinstance(dims, Mapping):
        return Inputs(tuple(dims), dict.fromkeys(inputs.kwargs, 0))
    signature = inspect.signature(module.forward)
    names = [name for name, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    unknown = set(dims) - set(signature.parameters) - set(inputs.kwargs)
    if unknown:
        raise ValueError(
            f"`batch_dims` names {sorted(unknown)}, which {type(module).__name__}.forward{signature} doesn't have."
        )
    return Inputs(
        tuple(dims.get(name, 0) for name in (names + [""] * len(inputs.args))[: len(inputs.args)]),
        {name: dims.get(name, 0) for name in inputs.kwargs},
    )


_PLAIN = {str, bool, int, float, type(None)}

_PLACEHOLDER = torch.empty(0)
"""Stands for a tensor in a tree that autograd shall not find tensors in: it keeps and watches them itself."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in order.

    Example:
        >>> [tensor.item() for tensor in tensors_of(Inputs((torch.tensor(1),), {"mask": None, "x": [torch.tensor(2)]}))]
        [1, 2]
    """
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(node: Any, found: list[Tensor]) -> None:
    kind = type(node)
    if isinstance(node, Tensor):
        found.append(node)
    elif kind is tuple or kind is list or kind is Inputs:
        for child in node:
            _collect(child, found)
    elif kind is dict:
        for child in node.values():
            _collect(child, found)
    elif kind not in _PLAIN:  # what is left takes a longer look, for its paths as well
        for _, _, child in children(node) or ():
            _collect(child, found)


def without_tensors(tree: Any) -> Any:
    """The tree with an empty tensor in place of each tensor."""
    return map_leaves(lambda leaf: _PLACEHOLDER if isinstance(leaf, Tensor) else leaf, tree)


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree with these in place of its tensors, in order."""
    if isinstance(tree, Tensor):
        return tensors[0]
    if type(tree) is Inputs and not tree.kwargs and all([type(leaf) is Tensor for leaf in tree.args]):
        return Inputs(tuple(tensors), {})  # the most frequent call, without the walk
    remaining = iter(tensors)
    return map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, tree)


def is_floating(leaf: Any) -> bool:
    """Whether this leaf may pass gradients."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def copied(leaf: Any) -> Any:
    """A tensor as it is now; anything else itself."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def as_leaf(leaf: Any, like: Any = None) -> Any:
    """A tensor as a leaf that needs a gradient as another one does, or as it does itself."""
    like = leaf if like is None else like
    return leaf.detach().requires_grad_(like.requires_grad) if isinstance(leaf, Tensor) else leaf


class Samples:
    """Some numbers of each input that lies in host memory, where it may be refilled behind autograd's back."""

    def __init__(self, paths: Sequence[str], tensors: Sequence[Tensor], skeleton: Any) -> None:
        self.paths, self.skeleton = paths, skeleton
        self._then = list(self._taken(tensors))

    def _taken(self, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
        for path, tensor in zip(self.paths, tensors, strict=True):
            plain = type(tensor) is Tensor and not (tensor.is_nested or tensor.is_quantized)
            if plain and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                yield path, tensor.detach().take(_positions(tensor.numel()))
        for path, leaf in leaves(self.skeleton):
            if type(leaf).__module__ == "numpy" and has_rows(leaf) and leaf.dtype.kind in "biufc":
                yield path, torch.as_tensor(leaf.flat[_positions(leaf.size).numpy()])

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise a RuntimeError if they are others now."""
        for (path, then), (_, now) in zip(self._then, self._taken(tensors), strict=True):
            if not same(now, then):
                raise RuntimeError(
                    f"{path.removeprefix('.')} of a chunked module was edited between forward and backward, which runs "
                    "the module on it again: through NumPy, `.data` or a buffer that is refilled. Pass a copy, or "
                    "refill it after backward."
                )


@functools.lru_cache(maxsize=64)
def _positions(count: int) -> Tensor:
    """Up to 256 places in so many numbers, in step with no row length."""
    return torch.arange(count) if count <= 256 else torch.arange(256) * 2654435761 % count
