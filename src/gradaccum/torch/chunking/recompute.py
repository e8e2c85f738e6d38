"""What a forward pass depends on, kept so that it can be run again exactly.

Its inputs, as trees whose tensors are taken out and put back; what its module holds; the random numbers (PyTorch's on
every device concerned, Python's, NumPy's, and those of the module's own generators), and autocast.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.batch import BatchDims, children, has_rows, leaves, map_leaves
from gradaccum.on_torch.random_state import RandomState, is_generator
from gradaccum.on_torch.state import same

__all__ = [
    "Conditions",
    "Inputs",
    "ModuleContents",
    "Samples",
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


_NO_CONTEXT = contextlib.nullcontext()
_UNWATCHED = {dict, OrderedDict, set, list, tuple, *_PLAIN}
"""Types of most attributes of a module, which need no second look."""


def accelerators(tensors: Iterable[Any]) -> list[torch.device]:
    """The devices of these tensors, each once, without the CPU."""
    found = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


class ModuleContents:
    """What a module holds at this moment: parameters, buffers, submodules, hooks, and attributes such as `training`.

    Attributes are remembered as they are assigned; what is edited inside one of them, say a list, is not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self.owners: dict[int, nn.Module] = {}
        """The modules by the `id` of the dict that holds their buffers."""
        self.holders: list[dict[str, Any]] = []
        """These dicts, but for those of BatchNorm layers."""
        self.generators: list[Any] = []
        """Random number generators that are attributes."""
        self.tensors: set[int] = set()
        """The buffers, and the tensors that are attributes, by `id`."""
        self.modes: set[tuple[Any, ...]] = {(-1, kind, by) for kind, by in _hooks(_EVERYWHERE)}
        """What each module, by its place, is, whether it is in training mode, with the root's own, and its hooks."""
        self._held: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._held_parameters: list[tuple[dict[str, Any], dict[str, Any]]] = []
        submodules = {id(submodule): submodule for submodule in module.modules()}
        waiting = list(submodules.values())
        for place, submodule in enumerate(waiting):
            attributes = vars(submodule)
            self.modes.add((module.training, place, submodule.training, type(submodule).__qualname__))
            self.modes.update([(place, kind, by) for kind, by in _hooks(attributes)])
            for inner in self._hold_attributes(attributes):
                if id(inner) not in submodules:
                    submodules[id(inner)] = inner
                    waiting.append(inner)
            buffers = attributes["_buffers"]
            self.owners[id(buffers)] = submodule
            if not isinstance(submodule, _BatchNorm):
                self.holders.append(buffers)
            self.buffers += [(buffers, name, buffer) for name, buffer in buffers.items() if buffer is not None]
            self.tensors.update(map(id, buffers.values()))
            for kind in ("_buffers", "_modules", *_HOOKS):
                self._held.append((attributes[kind], dict(attributes[kind])))
            if own := attributes["_parameters"]:
                self._held_parameters.append((own, dict(own)))
        every = [p for _, own in self._held_parameters for p in own.values() if p is not None]
        self.parameters = list({id(p): p for p in every}.values())
        """Each once. What `torch.func.functional_call` puts in their place counts."""
        self._frozen = [(p, version_of(p)) for p in self.parameters if not p.requires_grad]

    def _hold_attributes(self, attributes: dict[str, Any]) -> list[nn.Module]:
        """Returns the modules among them that torch doesn't know of, such as the inside of a `Chunked`."""
        then, modules = dict(attributes), []
        for name, value in attributes.items():
            if type(value) in _UNWATCHED:
                continue
            if isinstance(value, nn.Module):
                modules.append(value)
            elif isinstance(value, Tensor):
                self.tensors.add(id(value))
                if value.grad_fn is not None:
                    del then[name]  # made by an earlier call, whose graph would live as long as this one's
            elif is_generator(value):
                self.generators.append(value)
        self._held.append((attributes, then))
        return modules

    @contextlib.contextmanager
    def restored(self, replacements: Mapping[int, Tensor] | None = None) -> Iterator[None]:
        """The module holds what it held then, with these in place of parameters; afterwards what it holds now."""
        replacements = dict(replacements or {})
        for parameter, version in self._frozen:
            if version_of(parameter) != version:
                raise RuntimeError(
                    f"A frozen parameter of shape {tuple(parameter.shape)} of a chunked module was edited in place "
                    "between forward and backward, which runs the module again. Update it after backward."
                )
            if parameter.requires_grad:  # unfrozen since
                replacements[id(parameter)] = parameter.detach()
        found = [(holder, dict(holder)) for holder, _ in (*self._held, *self._held_parameters)]
        try:
            for holder, then in self._held:
                _set(holder, then)
            for holder, then in self._held_parameters:
                _set(holder, {name: replacements.get(id(p), p) for name, p in then.items()})
            yield
        finally:
            for holder, now in found:
                _set(holder, now)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The tensors and numbers, and containers of such, that modules have as attributes of their own."""
    return {
        f"{path}.{name}" if path else name: value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if name not in _OF_EVERY_MODULE and all(isinstance(v, (Tensor, int, float)) for _, v in leaves(value))
    }


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_EVERYWHERE = {kind: vars(torch.nn.modules.module).get(f"_global{kind}", {}) for kind in _HOOKS}
"""Hooks that torch calls for every module."""


def _hooks(attributes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Hooks, and a `forward` of a module's own, by where their code is; not this package's, which come and go."""
    for kind in _HOOKS:
        for hook in attributes[kind].values() if attributes[kind] else ():
            by = _code_of(hook)
            if not by.startswith("gradaccum."):
                yield kind, by
    if "forward" in attributes:
        yield "forward", _code_of(attributes["forward"])


def _code_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    named = function if code is not None and hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}:{code.co_firstlineno if code is not None else 0}"


def _set(holder: dict[Any, Any], content: dict[Any, Any]) -> None:
    if len(holder) != len(content) or not all(map(is_, holder.values(), content.values())):
        holder.clear()
        holder.update(content)


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
            return _NO_CONTEXT
        stack = contextlib.ExitStack()
        for type_, enabled, dtype in casts:
            stack.enter_context(torch.autocast(type_, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
        return stack
