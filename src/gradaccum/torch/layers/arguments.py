"""What a block is called with: tensors in containers, in caches and other objects, and what it writes to these.

A block runs again when its turn comes in backward. It must find its arguments as they were then: the cache without the
keys and values that it has put there since, the list without what it has appended. Tensors that pass gradients on are
inputs of the block wherever they are, such as the keys and values of prefix tuning inside of a cache. What a block
writes to its arguments is among its outputs.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradaccum.on_torch.batch import children, rebuild
from gradaccum.on_torch.random_state import is_generator
from gradaccum.torch.chunking.recompute import Inputs, version_of

__all__ = ["Arguments", "GivenTensors", "replaced", "tensors_in"]

_AS_THEY_ARE = (nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType, torch.dtype)
_PLAIN = {str, bool, int, float, type(None), torch.device, torch.dtype, torch.Size}

_SLOT = torch.empty(0)
"""Stands for a tensor in a copy of the arguments, so that nobody holds the tensor twice."""

GivenTensors = dict[int, tuple[Any, list[Tensor]]]
"""Of each object, by id, the tensors that it had when the first block of a micro-batch was called with it."""


class Arguments:
    """The arguments of a block's call, as they are before it.

    Of objects, tensors that other blocks have put there since the first one (`given`) are replaced by shapes: a cache
    of all blocks' keys and values would take the memory of all blocks.

    Example:
        >>> class Cache:
        ...     def __init__(self):
        ...         self.keys = []
        >>> cache = Cache()
        >>> arguments = Arguments(Inputs((torch.ones(2), cache), {}), {})
        >>> cache.keys.append(torch.ones(2))            # what the block does
        >>> arguments.close()
        >>> arguments.filled(arguments.tensors).args[1].keys
        []
    """

    def __init__(self, inputs: Inputs, given: GivenTensors) -> None:
        self.tensors: list[Tensor] = []
        """Those that the block needs when it runs again, each once: direct arguments, and what passes gradients on."""
        self._slots: list[int | Tensor] = []
        """Of each tensor in the copy, its number among these, or the tensor itself."""
        self._objects: list[tuple[Any, Any, Any, bool]] = []
        self._numbers: dict[int, int] = {}
        self._given = given
        self._copy = self._copied(inputs, {}, None)
        self._originals: dict[int, Any] = {}

    def _copied(self, node: Any, made: dict[int, Any], inside: set[int] | None) -> Any:
        """`inside`: an object's own tensors, by id, within one."""
        if isinstance(node, Tensor):
            return self._slot(node, inside)
        if type(node) in _PLAIN or id(node) in made:
            return made.get(id(node), node)
        if inside is not None or not _is_object(node) or dataclasses.is_dataclass(node):  # which are containers
            return _copy(node, made, lambda child: self._copied(child, made, inside))
        # The block may write to this one. Where it turns out not to, the object itself is used.
        tensors: list[Tensor] = []
        before = _fingerprint(node, {}, tensors)
        own = {id(tensor) for tensor in self._given.setdefault(id(node), (node, tensors))[1]}
        count = len(self.tensors)
        new = _copy(node, made, lambda child: self._copied(child, made, own))
        self._objects.append((node, before, new, len(self.tensors) > count))
        return new

    def _slot(self, tensor: Tensor, inside: set[int] | None) -> Tensor:
        if inside is not None and not (tensor.requires_grad and id(tensor) in inside):
            kept = id(tensor) in inside  # else only its shape
            self._slots.append(tensor if kept else torch.empty_like(tensor, device="meta", requires_grad=False))
        else:
            number = self._numbers.setdefault(id(tensor), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(tensor)
            self._slots.append(number)
        return _SLOT

    def close(self) -> None:
        """The call is over: objects that it has left alone are used again, in place of their copies."""
        for node, before, made, has_inputs in self._objects:
            if not has_inputs and _fingerprint(node, {}, []) == before:
                self._originals[id(made)] = node
        self._objects, self._numbers, self._given = [], {}, {}

    def filled(self, tensors: Sequence[Tensor]) -> Inputs:
        """The arguments as they were, with these tensors in place of `tensors`."""
        slots = iter([slot if isinstance(slot, Tensor) else tensors[slot] for slot in self._slots])
        inputs: Inputs = self._filled(self._copy, slots, {})
        return inputs

    # No function that calls itself from inside: it would keep tensors alive until Python looks for cycles.

    def _filled(self, node: Any, slots: Iterator[Tensor], made: dict[int, Any]) -> Any:
        if isinstance(node, Tensor):
            return next(slots)
        if type(node) in _PLAIN:
            return node
        if id(node) not in made:
            _copy(node, made, lambda child: self._filled(child, slots, made))
        return self._originals.get(id(node), made[id(node)])


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree, inside of objects, too, each once."""
    found: dict[int, Tensor] = {}
    _look(tree, found, {})
    return list(found.values())


def _look(node: Any, found: dict[int, Tensor], seen: dict[int, Any]) -> None:
    if isinstance(node, Tensor):
        found[id(node)] = node
    elif type(node) not in _PLAIN and id(node) not in seen:
        seen[id(node)] = node
        for child in _children(node):
            _look(child, found, seen)


def replaced(tree: Any, new: Mapping[int, Tensor]) -> Any:
    """The tree with other tensors in place of some, by id: in the same lists, dicts and objects.

    Example:
        >>> one, two = torch.ones(1), torch.zeros(1)
        >>> written = {"keys": [one]}
        >>> replaced(written, {id(one): two}) is written, written["keys"][0] is two
        (True, True)
    """
    return _replaced(tree, new, {}) if new else tree


def _replaced(node: Any, new: Mapping[int, Tensor], made: dict[int, Any]) -> Any:
    if isinstance(node, Tensor):
        return new.get(id(node), node)
    if type(node) in _PLAIN or id(node) in made:
        return made.get(id(node), node)
    if type(node) is list or type(node) is dict or _is_object(node):
        made[id(node)] = node
        holder: Any = vars(node) if _is_object(node) else node
        for key, value in [*(enumerate(holder) if type(node) is list else holder.items())]:
            other = _replaced(value, new, made)
            if other is not value:
                holder[key] = other
    elif any(id(tensor) in new for tensor in tensors_in(node)):
        return _copy(node, made, lambda child: _replaced(child, new, made))
    return node


def _is_object(value: Any) -> bool:
    """Whether this is an object of the user's that somebody can write to, such as a cache."""
    containers = (Mapping, list, tuple, set, functools.partial)
    if not hasattr(value, "__dict__") or isinstance(value, (*_AS_THEY_ARE, *containers)):
        return False
    return not is_generator(value) and not type(value).__name__.endswith("Config")


def _children(node: Any) -> list[Any]:
    if isinstance(node, tuple):  # PackedSequence, too
        return list(node)
    if isinstance(node, functools.partial):
        return [*node.args, *node.keywords.values()]
    if _is_object(node):
        return list(vars(node).values())
    return [child for _, _, child in children(node) or ()]


def _copy(node: Any, made: dict[int, Any], copied: Callable[[Any], Any]) -> Any:
    """A container or object of the same kind, with `copied(child)` in place of each child; a leaf itself."""
    new: Any
    if type(node) is list:
        made[id(node)] = new = []
        new.extend([copied(child) for child in node])
    elif type(node) is dict or _is_object(node):
        made[id(node)] = new = {} if type(node) is dict else _another(node)
        own, others = (node, new) if type(node) is dict else (vars(node), vars(new))
        others.update([(key, copied(child)) for key, child in own.items()])
    elif type(node) is set:
        new = set(node)
    elif isinstance(node, PackedSequence):
        new = type(node)(*map(copied, node))
    elif isinstance(node, functools.partial):
        keywords = {key: copied(child) for key, child in node.keywords.items()}
        new = functools.partial(node.func, *map(copied, node.args), **keywords)
    else:
        inside = children(node)
        new = node if inside is None else rebuild(node, [copied(child) for _, _, child in inside])
    made[id(node)] = new
    return new


def _another(value: Any) -> Any:
    """Another of its class."""
    try:
        return object.__new__(type(value))
    except TypeError:  # of a class that is written in C
        return copy.copy(value)


def _fingerprint(value: Any, seen: dict[int, tuple[int, Any]], tensors: list[Tensor]) -> Any:
    """What changes when somebody writes to this object, or to one inside of it. `seen` keeps what has an id."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return id(value), version_of(value)
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    names: Any = list(vars(value)) if _is_object(value) else list(value) if isinstance(value, (Mapping, set)) else []
    names = [name if isinstance(name, (str, int)) else id(name) for name in names]
    return id(type(value)), names, [_fingerprint(child, seen, tensors) for child in _children(value)] or id(value)
