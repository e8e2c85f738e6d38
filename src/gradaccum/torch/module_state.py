"""What modules, and the objects that functions hold, are at a moment: attributes, buffers, hooks; and put back."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.random_state import all_generators, is_generator, kept
from gradaccum.on_torch.reach import Holder
from gradaccum.on_torch.state import BufferSnapshot, Snapshot

logger = logging.getLogger("gradaccum")

_LARGE = 1 << 26
"""Bytes from which on a tensor that a function reaches is data, which stands still."""
_SMALL = 1 << 20
"""Bytes up to which a frozen parameter is copied: larger ones are pretrained weights, which stand still."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, OrderedDict)
_INSIDE = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if "hooks" in name)
_OF_PASSES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_UNWATCHED = {*_CONTAINERS, tuple, str, bool, int, float, type(None)}
"""Types of most attributes of a module, which need no second look."""


class Contents:
    """What modules hold at this moment: attributes, parameters, buffers, submodules, and hooks.

    All of it together: a flag that says whether hooks have been registered is right beside those hooks alone.
    `containers`: lists, dicts and sets among the attributes as well. Of what is `hooked`, hooks alone. `others`: what
    functions hold beside modules.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        hooked: Iterable[nn.Module] = (),
        *,
        containers: bool = True,
        others: Iterable[Holder] = (),
    ) -> None:
        self._held, self._empty = list[tuple[Any, Any]](), list[Any]()
        names = (*_INSIDE, *(_HOOKS if containers else _OF_PASSES))
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                own = vars(module)
                self._hold([own, *[own[name] for name in names if name in own]])
                if containers:
                    self._hold([value for value in _own_attributes(own).values() if type(value) in _CONTAINERS])
        for module in hooked:
            self._hold([vars(module)[name] for name in _HOOKS if name in vars(module)])
        self._hold([holder.content for holder in others])

    def _hold(self, holders: Iterable[Any]) -> None:
        holders = [*holders]
        self._held += [(holder, holder.copy()) for holder in holders if holder]
        self._empty += [holder for holder in holders if not holder]  # as most are

    def put_back(self) -> None:
        """Make it what it was."""
        for holder, content in self._held:
            _set(holder, content)
        for holder in self._empty if any(self._empty) else ():
            holder.clear()


def _own_attributes(own: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a module that not every module has."""
    return {name: value for name, value in own.items() if name not in _OF_EVERY_MODULE}


def _set(holder: Any, content: Any) -> None:
    same_names = isinstance(holder, MutableMapping) and holder.keys() == content.keys()
    if same_names and all(map(is_, holder.values(), content.values())):
        return
    holder.clear()
    (holder.extend if isinstance(holder, list) else holder.update)(content)


class ModuleContents(Contents):
    """What a module holds at this moment, to run it again.

    Attributes are remembered as they are assigned; what is edited inside one of them, say a list, is not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = _with_hidden_ones(module)
        super().__init__(self.modules, containers=False)
        self.buffers = [buffer for part in self.modules for buffer in part.buffers(recurse=False)]
        every = [parameter for part in self.modules for parameter in part.parameters(recurse=False)]
        self.parameters: list[Tensor] = list({id(p): p for p in every}.values())
        """Each once. What `torch.func.functional_call` puts in their place counts."""
        self.trained_count = sum(parameter.requires_grad for parameter in every)
        own = [value for part in self.modules for value in vars(part).values() if type(value) not in _UNWATCHED]
        self.generators = [*filter(is_generator, own)]
        """Random number generators that are attributes."""
        self.tensors = {id(tensor) for tensor in (*self.buffers, *own) if isinstance(tensor, Tensor)}
        """The buffers, and the tensors that are attributes, by `id`."""
        self._forget_graphs({id(value) for value in own if isinstance(value, Tensor) and value.grad_fn is not None})
        self._frozen = [(p, p._version) for p in self.parameters if not (p.requires_grad or p.is_inference())]

    def _forget_graphs(self, made: Collection[int]) -> None:
        """A tensor that an earlier call has made has a graph, which would live as long as this one's."""
        for _, then in self._held if made else ():
            for name in [name for name, value in then.items() if id(value) in made] if then else ():
                del then[name]

    def modes(self) -> set[tuple[Any, ...]]:
        """What each module, by its place, is, whether it is in training mode, with the root's own, and its hooks."""
        found: set[tuple[Any, ...]] = set()
        for place, part in enumerate(self.modules):
            own = vars(part)
            found.add((self.modules[0].training, place, part.training, type(part).__qualname__))
            found.update([(place, *where) for kind in _OF_PASSES for where in _hooks(kind, own[kind])])
            found.update([(place, "forward", _code_of(own["forward"]))] if "forward" in own else [])
        everywhere = vars(torch.nn.modules.module)  # hooks that are called for every module
        return found.union(*([(-1, *where) for where in _hooks(k, everywhere[f"_global{k}"])] for k in _OF_PASSES))

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
        found = [(holder, dict(holder)) for holder in (*[holder for holder, _ in self._held], *self._empty)]
        try:
            self.put_back()
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
    """The contents of modules at this moment, with the values of buffers, attributes and small frozen parameters."""

    def __init__(self, roots: Mapping[str, nn.Module], holders: Sequence[Holder] = ()) -> None:
        seen: set[nn.Module] = set()
        named = [found for prefix, root in roots.items() for found in root.named_modules(seen, prefix=prefix)]
        modules = [module for _, module in named]
        self.made: dict[str, tuple[str, str, str]] = {}
        """Of each buffer that a pass has made since, by its full name: path and kind of its module, its name there."""
        self._contents, self._held = Contents(modules, others=holders), list[tuple[str, BufferSnapshot]]()
        self._start = Snapshot(modules=[module for module in modules if not isinstance(module, _BatchNorm)])
        self._places = {id(module._buffers): (path, module) for path, module in named}
        self._numbers = list[tuple[str, MutableMapping[str, Any], str]]()
        for path, module in named:
            frozen = [(n, p) for n, p in module._parameters.items() if p is not None and not p.requires_grad]
            self._hold(path, module._buffers, module._buffers)
            self._hold(path, {name: p for name, p in frozen if p.nbytes <= _SMALL}, module._parameters)
            if not isinstance(module, torch.jit.ScriptModule):
                own, others = vars(module), _own_attributes(vars(module))
                self._hold(path, others, own)
                is_ours = type(module).__module__.startswith("gradaccum.")  # a chunked module counts its calls
                numbers = [] if is_ours else [key for key, value in others.items() if type(value) in (int, float)]
                self._numbers += [(_joined(path, key), own, key) for key in numbers]
        self._hold_others(holders, modules)

    def _hold_others(self, holders: Sequence[Holder], modules: Iterable[nn.Module]) -> None:
        """Tensors that get no gradients, and numbers, of what functions hold beside modules."""
        known = {id(value) for module in modules for value in (*module._parameters.values(), *module._buffers.values())}
        for holder in holders:
            values = {str(key): value for key, value in holder.places.items() if id(value) not in known}
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            small = {key: t for key, t in tensors.items() if t.nbytes <= _LARGE and not t.requires_grad}
            self._hold(holder.name, small, holder.places)
            known.update(map(id, small.values()))
            numbers = [key for key, value in values.items() if type(value) in (int, float)]
            self._numbers += [(_joined(holder.name, key), holder.places, key) for key in numbers]

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
        for made in self._start.made():
            path, module = self._places[id(made.owner)]
            name = _joined(path, made.name)
            self.made[name] = path, type(module).__name__, made.name
            now[name] = made.owner[made.name].detach().clone()
        return now

    def numbers(self) -> dict[str, float]:
        """The numbers among the attributes as they are now, by name: one that hasn't moved is the same object."""
        now = [(name, own.get(key)) for name, own, key in self._numbers]
        return {name: value for name, value in now if type(value) in (int, float)}  # type: ignore[misc]  # numbers

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was."""
        self._contents.put_back()
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
    generators: Iterable[Any] = (),
    holders: Sequence[Holder] = (),
) -> Iterator[ModuleState]:
    """Gradients, the state of modules and of what else functions hold, and random numbers are as before afterwards.

    Gradients start empty.
    """
    state = ModuleState(roots, holders)
    with kept([*all_generators(devices), *generators]), gradients_kept(parameters):
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
