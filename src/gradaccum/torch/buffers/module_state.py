"""What modules hold at a moment, gradients and random numbers beside it, and how to put it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.random_state import all_generators, kept
from gradaccum.on_torch.state import BufferDicts, same, set_to

__all__ = ["Attributes", "ModuleState", "gradients_kept", "left_as_found", "owners_of_buffers"]

_SMALL = 1 << 20
"""Bytes up to which a frozen parameter is copied: larger ones are pretrained weights, which stand still."""


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set)
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if "hooks" in name)


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
            own = vars(module)
            if list(own) == list(attributes) and all(map(is_, own.values(), attributes.values())):
                continue
            for key in own.keys() - attributes.keys():
                del own[key]
            own.update(attributes)
        for container, content in self._containers:
            if container or content:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


class ModuleState:
    """The buffers, small frozen parameters and plain attributes of modules at this moment."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._held: list[tuple[str, dict[str, Any], str, Tensor, Tensor]] = []
        """Name, the dict that holds it and its key there, tensor, copy."""
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
                    self._held.append((_joined(path, key), owner, key, value, value.detach().clone()))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what these tensors are now, by name; without attributes that are of another shape now."""
        now = {}
        for name, owner, key, tensor, _ in self._held:
            found = owner.get(key)
            if not isinstance(found, Tensor) or found.grad_fn is not None:
                continue
            if found.shape == tensor.shape or id(owner) in self._places:
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
        for _, owner, key, tensor, copy in self._held:
            if owner.get(key) is not tensor:
                owner[key] = tensor
            if not same(tensor, copy):
                set_to(tensor, copy)


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
