"""What modules hold at a moment, gradients and random numbers beside it, and how to put it back."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.random_state import all_generators, is_generator, kept
from gradaccum.on_torch.state import BufferDicts, BufferSnapshot

__all__ = ["Attributes", "ModuleContents", "ModuleState", "gradients_kept", "left_as_found", "owners_of_buffers"]

_SMALL = 1 << 20
"""Bytes up to which a frozen parameter is copied: larger ones are pretrained weights, which stand still."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, OrderedDict)
_INSIDE = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if "hooks" in name)
_OF_PASSES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_UNWATCHED = {*_CONTAINERS, tuple, str, bool, int, float, type(None)}
"""Types of most attributes of a module, which need no second look."""


class Attributes:
    """What modules have as plain attributes, in the lists, dicts and sets among them, and as hooks at this moment.

    All of it together: a flag that says whether hooks have been registered is right beside those hooks alone.
    """

    def __init__(self, modules: Iterable[nn.Module], hooked: Iterable[nn.Module] = ()) -> None:
        self.held: list[tuple[nn.Module, dict[str, Any]]] = []
        """Of each module, what is in its `__dict__`."""
        self._containers: list[tuple[Any, Any]] = []
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                own = vars(module)
                self.held.append((module, dict(own)))
                self._keep(own, {name for name in own.keys() - _OF_EVERY_MODULE if type(own[name]) in _CONTAINERS})
                self._keep(own, _HOOKS)
        for module in hooked:
            self._keep(vars(module), _HOOKS)

    def _keep(self, own: dict[str, Any], names: Iterable[str]) -> None:
        containers = [own[name] for name in names if name in own]
        self._containers += [(found, found.copy() if found else ()) for found in containers]  # mostly they are empty

    def put_back(self) -> None:
        """Make it what it was."""
        for module, attributes in self.held:
            _set(vars(module), attributes)
        for container, content in self._containers:
            if container or content:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def _set(holder: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    if holder.keys() != content.keys() or not all(map(is_, holder.values(), content.values())):
        holder.clear()
        holder.update(content)


class ModuleContents:
    """What a module holds at this moment, to run it again: parameters, buffers, submodules, hooks, and attributes.

    Attributes are remembered as they are assigned; what is edited inside one of them, say a list, is not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = _with_hidden_ones(module)
        attributes = [(submodule, vars(submodule)) for submodule in self.modules]
        self.buffers = [b for part in self.modules for b in part._buffers.values() if b is not None]
        every = [p for part in self.modules for p in part._parameters.values() if p is not None]
        self.parameters: list[Tensor] = list({id(p): p for p in every}.values())
        """Each once. What `torch.func.functional_call` puts in their place counts."""
        own = [value for _, values in attributes for value in values.values() if type(value) not in _UNWATCHED]
        self.generators = [value for value in own if is_generator(value)]
        """Random number generators that are attributes."""
        self.tensors = {id(tensor) for tensor in (*self.buffers, *own) if isinstance(tensor, Tensor)}
        """The buffers, and the tensors that are attributes, by `id`."""
        of_torch = vars(torch.nn.modules.module)  # hooks that are called for every module
        self.modes: set[tuple[Any, ...]] = set()
        """What each module, by its place, is, whether it is in training mode, with the root's own, and its hooks."""
        for place, (part, values) in enumerate(attributes):
            self.modes.add((module.training, place, part.training, type(part).__qualname__))
            self.modes.update([(place, *where) for kind in _OF_PASSES for where in _hooks(kind, values[kind])])
            self.modes.update([(place, "forward", _code_of(values["forward"]))] if "forward" in values else [])
        for kind in _OF_PASSES:
            self.modes.update([(-1, *where) for where in _hooks(kind, of_torch.get(f"_global{kind}", {}))])
        holders = [values[name] for _, values in attributes for name in (*_INSIDE, *_HOOKS) if name in values]
        self._held = [(holder, dict(holder)) for holder in holders]
        # A tensor that an earlier call has made has a graph, which would live as long as this one's.
        self._held += [
            (values, {k: v for k, v in values.items() if not (isinstance(v, Tensor) and v.grad_fn is not None)})
            for _, values in attributes
        ]
        self._frozen = [(p, p._version) for p in self.parameters if not (p.requires_grad or p.is_inference())]

    @contextlib.contextmanager
    def restored(self, replacements: Mapping[int, Tensor] | None = None) -> Iterator[None]:
        """The module holds what it held then, with these in place of parameters; afterwards what it holds now."""
        replacements = dict(replacements or {})
        for parameter, version in self._frozen:
            if parameter._version != version:
                raise RuntimeError(
                    f"A frozen parameter of shape {tuple(parameter.shape)} of a chunked module was edited in place "
                    "between forward and backward, which runs the module again. Update it after backward."
                )
            if parameter.requires_grad:  # unfrozen since
                replacements[id(parameter)] = parameter.detach()
        found = [(holder, dict(holder)) for holder, _ in self._held]
        try:
            for holder, then in self._held:
                _set(holder, then)
            for module in self.modules:
                own = module._parameters
                own.update({name: replacements[id(p)] for name, p in own.items() if id(p) in replacements})  # type: ignore[misc]  # what takes the place of parameters
            yield
        finally:
            for holder, now in found:
                _set(holder, now)


def _with_hidden_ones(module: nn.Module) -> list[nn.Module]:
    """Its modules, and those among attributes that torch doesn't know of, such as the inside of a `Chunked`."""
    found = dict.fromkeys(module.modules())
    waiting = [*found]
    for part in waiting:
        for value in vars(part).values():
            if type(value) not in _UNWATCHED and isinstance(value, nn.Module) and value not in found:
                new = [inside for inside in value.modules() if inside not in found]
                found.update(dict.fromkeys(new))
                waiting += new
    return waiting


def _hooks(kind: str, hooks: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Where the code of these hooks is; not this package's, which come and go."""
    for hook in hooks.values() if hooks else ():
        where = _code_of(hook)
        if not where.startswith("gradaccum."):
            yield kind, where


def _code_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    named = function if code is not None and hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}:{code.co_firstlineno if code is not None else 0}"


class ModuleState:
    """The buffers, small frozen parameters and plain attributes of modules at this moment."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._held: list[tuple[str, BufferSnapshot]] = []
        self.made: dict[str, tuple[str, str, str]] = {}
        """Of each buffer that a pass has made since, by its full name: path and kind of its module, its name there."""
        seen: set[nn.Module] = set()
        named = [found for prefix, root in roots.items() for found in root.named_modules(seen, prefix=prefix)]
        self._places = {id(module._buffers): (path, module) for path, module in named}
        self._dicts = BufferDicts({id(m._buffers): m for _, m in named if not isinstance(m, _BatchNorm)})
        for path, module in named:
            self._hold(path, dict(module.named_buffers(recurse=False)), module._buffers)
            frozen = {name: p for name, p in module.named_parameters(recurse=False) if not p.requires_grad}
            self._hold(path, {n: p for n, p in frozen.items() if p.nbytes <= _SMALL}, module._parameters)
            if not isinstance(module, torch.jit.ScriptModule):
                self._hold(path, vars(module), vars(module))
        self._paths = [path for path, module in named if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = Attributes(module for _, module in named)

    def _hold(self, path: str, found: Mapping[str, Any], owner: Any) -> None:
        for key, value in found.items():
            if isinstance(value, Tensor) and value.grad_fn is None and not value.is_meta:
                parts = getattr(value, "__tensor_flatten__", lambda: ((), 0))()[0]
                inner = {part: vars(value).get(part) for part in parts}
                if inner and None not in inner.values():  # quantised: the tensor itself can't be compared or copied
                    self._hold(_joined(path, key), inner, vars(value))
                else:
                    snapshot = BufferSnapshot(owner, key)
                    snapshot.take(whole=True)
                    self._held.append((_joined(path, key), snapshot))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what these tensors are now, by name; without attributes that are of another shape now."""
        now = {}
        for name, held in self._held:
            found = held.owner.get(held.name)
            if not isinstance(found, Tensor) or found.grad_fn is not None:
                continue
            if found.shape == held.copy.shape or id(held.owner) in self._places:  # type: ignore[union-attr]  # there is
                now[name] = found.detach().clone()
        for made in self._dicts.made():
            path, module = self._places[id(made.owner)]
            name = _joined(path, made.name)
            self.made[name] = path, type(module).__name__, made.name
            now[name] = made.owner[made.name].detach().clone()
        return now

    def numbers(self) -> dict[str, Tensor]:
        """What the numbers among the attributes are now, by name."""
        now = {}
        for path, (module, attributes) in zip(self._paths, self._attributes.held, strict=True):
            for key, before in attributes.items():
                value: Any = vars(module).get(key)
                if type(before) in (int, float) and type(value) in (int, float):
                    now[_joined(path, key)] = torch.tensor(float(value), dtype=torch.float64)
        return now

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was."""
        self._attributes.put_back()
        self._dicts.unmake()
        for _, held in self._held:
            held.put_back()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def owners_of_buffers(roots: Mapping[str, nn.Module]) -> dict[str, tuple[str, str, str]]:
    """Of each buffer, by its full name, the path and the kind of its module, and its name there."""
    return {
        _joined(path, name): (path, type(layer).__name__, name)
        for prefix, root in roots.items()
        for path, layer in root.named_modules(prefix=prefix)
        for name in layer._buffers
    }


@contextlib.contextmanager
def left_as_found(
    roots: Mapping[str, nn.Module],
    parameters: Sequence[Tensor],
    devices: Iterable[torch.device] = (),
    functions: Iterable[Any] = (),
) -> Iterator[ModuleState]:
    """Gradients, module state and random numbers are afterwards what they were before. Gradients start empty."""
    state = ModuleState(roots)
    with kept([*all_generators(devices), *held_generators(*roots.values(), *functions)]), gradients_kept(parameters):
        try:
            yield state
        finally:
            state.put_back()


@contextlib.contextmanager
def gradients_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """The gradients of these tensors are afterwards what they are now. They start empty."""
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
