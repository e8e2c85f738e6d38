"""What a forward pass depends on, kept so that it can be run again exactly.

Its inputs, as trees whose tensors are taken out and put back; what its module holds; the random numbers (PyTorch's on
every device concerned, Python's, NumPy's, and those of the module's own generators), and autocast.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import BatchDims, children, leaves, map_leaves
from gradaccum.on_torch.random_state import RandomState

__all__ = [
    "Conditions",
    "Inputs",
    "accelerators",
    "attributes_of",
    "dims_by_name",
    "is_floating",
    "parametrizations_computed",
    "tensors_of",
    "version_of",
    "with_tensors",
    "without_tensors",
]


class Inputs(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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
    """The tensors in a tree, in order."""
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


def version_of(tensor: Tensor) -> int:
    """How often it has been edited in place; inference tensors don't count."""
    return -1 if tensor.is_inference() else tensor._version


def accelerators(tensors: Iterable[Any]) -> list[torch.device]:
    """The devices of these tensors, each once, without the CPU."""
    found = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The tensors and numbers, and containers of such, that modules have as attributes of their own."""
    return {
        f"{path}.{name}" if path else name: value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if name not in _OF_EVERY_MODULE and all(isinstance(v, (Tensor, int, float)) for _, v in leaves(value))
    }


@contextlib.contextmanager
def parametrizations_computed() -> Iterator[None]:
    """Inside of `parametrize.cached()`: weights are computed, as what a pass without a graph would cache has none."""
    enabled = getattr(nn.utils.parametrize, "_cache_enabled", 0)
    if not enabled:
        yield
        return
    nn.utils.parametrize._cache_enabled = 0
    try:
        yield
    finally:
        nn.utils.parametrize._cache_enabled = enabled


class Conditions:
    """The random state and the autocast settings that a forward pass starts from."""

    def __init__(self, generators: Iterable[Any], devices: Iterable[torch.device] = ()) -> None:
        self.random = RandomState(generators)
        types = sorted({"cpu", *(device.type for device in devices)})
        self.autocast = [
            (type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_))
            for type_ in types
            if torch.amp.is_autocast_available(type_)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def advance(self, *, all_moved: bool = False) -> Conditions:
        """The forward pass has run: keep the states of the generators that it has moved, only."""
        following = object.__new__(Conditions)
        following.random, following.autocast = RandomState(self.random.states), self.autocast
        following.autocast_cache = self.autocast_cache
        if not all_moved:
            self.random = self.random.only(self.random.moved(following.random))
        return following

    def restored(self) -> contextlib.AbstractContextManager[Any]:
        """Set the generators to these states, and enter these autocast settings."""
        self.random.put_back()
        casts = [cast for cast in self.autocast if cast[1] or torch.is_autocast_enabled(cast[0])]
        if not casts:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for type_, enabled, dtype in casts:
            stack.enter_context(torch.autocast(type_, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
        return stack
