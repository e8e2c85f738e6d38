"""Inputs and outputs as trees: their tensors taken out, and put back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.on_torch.batch import leaves, map_leaves

__all__ = ["Inputs", "as_leaf", "by_name", "copied", "is_floating", "tensors_of", "with_tensors", "without_tensors"]


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


_PLACEHOLDER = torch.empty(0)
"""Stands for a tensor in a tree that autograd shall not find tensors in: it keeps and watches them itself."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


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
