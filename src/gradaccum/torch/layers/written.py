"""What passes write to, as each pass found it: objects among a block's arguments, such as caches, and buffers."""

from __future__ import annotations

import contextlib
import copy
import enum
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import leaves, map_leaves
from gradaccum.on_torch.random_state import is_generator

__all__ = ["MovedBuffers", "Objects", "Place", "lent"]

Place = tuple[dict[str, Any], str, Tensor]
"""Where a buffer is held: a dict, its key there, the buffer."""

_AS_THEY_ARE = (Tensor, nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType, torch.dtype)


class MovedBuffers:
    """Buffers that passes move, as each pass found them, so that it finds them so again.

    Args:
        places: Where each is held: a dict, its key there, the buffer.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)

    @torch.no_grad()
    def copies(self) -> list[tuple[Place, Tensor, int]]:
        """As they are now, before a first pass."""
        return [
            ((holder, name, buffer), buffer.clone(), -1 if buffer.is_inference() else buffer._version)
            for holder, name, _ in self._places
            if (buffer := holder.get(name)) is not None
        ]

    def moved(self, copies: list[tuple[Place, Tensor, int]]) -> list[tuple[Place, Tensor]]:
        """After it: the copies of those that it has moved. The others are left alone from here on."""
        moved = [
            (place, copy)
            for place, copy, version in copies
            # PyTorch's normalisation kernels don't raise the version of the statistics they move.
            if place[0].get(place[1]) is not place[2] or place[2]._version != version or place[1].startswith("running_")
        ]
        if len(moved) < len(self._places):
            names = {(id(holder), name) for (holder, name, _), _ in moved}
            self._places = [place for place in self._places if (id(place[0]), place[1]) in names]
        return moved


@contextlib.contextmanager
def lent(copies: list[tuple[Place, Tensor]]) -> Iterator[None]:
    """Around a repetition: it finds these buffers, and what it does to them is forgotten."""
    held = [(holder, name, holder.get(name)) for (holder, name, _), _ in copies]
    try:
        for (holder, name, _), copy in copies:
            holder[name] = copy.clone()
        yield
    finally:
        for holder, name, buffer in held:
            holder[name] = buffer


class Objects:
    """The objects of one micro-batch's calls: as each block finds them, without the tensors of the blocks before.

    Example:
        >>> class Cache:
        ...     def __init__(self):
        ...         self.keys = []
        >>> cache, objects = Cache(), Objects()
        >>> found = objects.found((cache,))
        >>> cache.keys.append(torch.ones(2))            # what the block does
        >>> objects.as_found((cache,), found)[0].keys
        []
    """

    def __init__(self) -> None:
        self._given: dict[int, tuple[Any, list[Tensor]]] = {}

    def found(self, tree: Any) -> dict[int, tuple[Any, Any]]:
        """Copies of the objects in a tree, as they are now, each with what tells whether it changes."""
        copies = {}
        for _, leaf in leaves(tree):
            if _writable(leaf) and id(leaf) not in copies:
                tensors: list[Tensor] = []
                print_ = _fingerprint(leaf, {}, tensors)
                given = self._given.setdefault(id(leaf), (leaf, tensors))[1]  # as before the first block
                copies[id(leaf)] = print_, _copied(leaf, {}, set(map(id, given)))
        return copies

    def as_found(self, tree: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
        """The tree with these copies in place of those objects that have changed since."""
        if not copies:
            return tree
        changed = {
            id(leaf): copies[id(leaf)][1]
            for _, leaf in leaves(tree)
            if id(leaf) in copies and _fingerprint(leaf, {}, []) != copies[id(leaf)][0]
        }
        return map_leaves(lambda leaf: changed.get(id(leaf), leaf), tree) if changed else tree


def _writable(value: Any) -> bool:
    if not hasattr(value, "__dict__") or isinstance(value, _AS_THEY_ARE):
        return False
    return not is_generator(value) and not type(value).__name__.endswith("Config")


def _fingerprint(value: Any, seen: dict[int, int], tensors: list[Tensor]) -> Any:
    """What changes when somebody writes to this object, or to one inside of it."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return id(value), -1 if value.is_inference() else value._version
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, (list, tuple, dict, set)) or _writable(value):
        seen[id(value)] = len(seen)
        inside = list(value.items()) if isinstance(value, dict) else value
        inside = inside if isinstance(inside, (list, tuple, set)) else list(vars(inside).items())
        return type(value).__name__, tuple([_fingerprint(one, seen, tensors) for one in inside])
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _copied(value: Any, made: dict[int, Any], given: set[int]) -> Any:
    """The same in containers of its own. Tensors that weren't given stand there without numbers."""
    if isinstance(value, Tensor):
        return value if id(value) in given else torch.empty_like(value, device="meta")
    if id(value) in made:
        return made[id(value)]
    if type(value) in (list, set):
        made[id(value)] = new = type(value)()
        (new.extend if isinstance(new, list) else new.update)(_copied(one, made, given) for one in value)
        return new
    if type(value) is tuple:
        return tuple([_copied(one, made, given) for one in value])
    if type(value) is dict:
        table: dict[Any, Any] = {}
        made[id(value)] = table
        table.update((key, _copied(one, made, given)) for key, one in value.items())
        return table
    if _writable(value):
        made[id(value)] = twin = _twin(value)
        vars(twin).update((name, _copied(one, made, given)) for name, one in vars(value).items())
        return twin
    return value


def _twin(value: Any) -> Any:
    """Another of its class."""
    try:
        return object.__new__(type(value))
    except TypeError:  # of a class that is written in C, such as functools.partial
        return copy.copy(value)
