"""What a forward pass depends on besides its inputs, kept so that it can be run again exactly.

What its module holds, the random numbers (PyTorch's on every device concerned, Python's, NumPy's, and those of the
module's own generators), autocast, and the buffers that the module moves.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.random_state import RandomState, is_generator

__all__ = [
    "Conditions",
    "ModuleContents",
    "accelerators",
    "check_not_sharded_inside",
    "checked_module",
    "parametrizations_computed",
]


_NO_CONTEXT = contextlib.nullcontext()
_PLAIN = {dict, OrderedDict, set, list, tuple, str, bool, int, float, type(None)}
"""Types of most attributes of a module, which need no second look."""


def accelerators(tensors: Iterable[Any]) -> list[torch.device]:
    """The devices of these tensors, each once, without the CPU.

    Example:
        >>> accelerators([torch.zeros(2), "no tensor"])
        []
    """
    found = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


class ModuleContents:
    """What a module holds at this moment: parameters, buffers, submodules, hooks, and attributes such as `training`.

    Attributes are remembered as they are assigned; what is edited inside one of them, say a list, is not noticed.

    Example:
        >>> layer = nn.Dropout(0.5)
        >>> state = ModuleContents(layer)
        >>> _ = layer.eval()
        >>> with state.restored():
        ...     layer.training
        True
        >>> layer.training
        False
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
        self._frozen = [(p, None if p.is_inference() else p._version) for p in self.parameters if not p.requires_grad]

    def _hold_attributes(self, attributes: dict[str, Any]) -> list[nn.Module]:
        """Returns the modules among them that torch doesn't know of, such as the inside of a `Chunked`."""
        then, modules = dict(attributes), []
        for name, value in attributes.items():
            if type(value) in _PLAIN:
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
            if version is not None and parameter._version != version:
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
    """The random state and the autocast settings that a forward pass starts from.

    Example:
        >>> here = Conditions(["cpu"])
        >>> drawn = torch.rand(3)
        >>> with here.restored():
        ...     again = torch.rand(3)
        >>> torch.equal(drawn, again)
        True
    """

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


def checked_module(module: Any) -> nn.Module:
    """A module that can be run again, in micro-batches."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`module` must be a torch.nn.Module, so that its parameters are known. "
            f"Received: {module!r} of type {type(module).__name__}."
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "`module` is a DistributedDataParallel, which expects one forward pass per backward pass. Chunk what "
            "it wraps: DistributedDataParallel(chunked(encoder, ...))."
        )
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'The module'!r} is a TorchScript module, whose parameters can't be put in place of each "
                "other. Chunk the module that it was made of."
            )
    return module


def check_not_sharded_inside(module: nn.Module) -> None:
    """Raise a ValueError if `fully_shard` was called on a part of the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, layer in module.named_modules() if fsdp is not None else ():
        if isinstance(layer, fsdp.FSDPModule):  # type: ignore[union-attr]  # not None here
            raise ValueError(
                f"{path or 'The module'!r} inside a chunked module is sharded by fully_shard, which would reduce the "
                "gradients of each micro-batch by itself. Shard around it: fully_shard(chunked(encoder, ...))."
            )
