"""What functions, modules and objects hold or refer to, and the random number generators among that."""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.random_state import is_generator

__all__ = ["MOST", "held_generators", "names_of"]

MOST = 64
"""Items of a list or a dict that are looked at."""

_DEEPEST = 3
"""Containers and objects inside of each other that are looked through."""

_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), enum.Enum, types.ModuleType, torch.dtype, torch.device)

_NOBODYS = ("builtins", "torch", "keras", "transformers")
"""Packages whose code draws from generators that it is given, and takes long to look through."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def names_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to by name: its closure, globals, and the defaults of its arguments.

    Example:
        >>> def outer(criterion):
        ...     return lambda x, scale=2.0: criterion(x) * scale
        >>> list(names_of(outer(print)))
        [('criterion', <built-in function print>), ('scale', 2.0)]
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults)
    yield from (function.__kwdefaults__ or {}).items()


def held_generators(*values: Any) -> list[Any]:
    """The generators that these functions, modules, containers and objects hold or refer to, each once.

    Of modules their attributes and the code of their own classes, of objects their attributes; of functions the names
    in their code, and functions among these that come from the same file.
    """
    found: list[Any] = []
    seen: set[int] = set()
    for value in values:
        _look(value, 0, seen, found)
    return found


def _look(value: Any, depth: int, seen: set[int], found: list[Any]) -> None:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    if is_generator(value):
        found.append(value)
    elif isinstance(value, types.FunctionType):
        for _, inner in names_of(value):
            if not isinstance(inner, types.FunctionType) or inner.__globals__ is value.__globals__:
                _look(inner, depth, seen, found)
    elif isinstance(value, types.MethodType):
        _look(value.__func__, depth, seen, found)
        _look(value.__self__, depth, seen, found)
    elif isinstance(value, type):
        return
    elif isinstance(value, nn.Module):
        for module in value.modules():
            seen.add(id(module))
            _look_inside(module, 0, seen, found)
    elif depth < _DEEPEST:
        _look_inside(value, depth + 1, seen, found)


def _look_inside(value: Any, depth: int, seen: set[int], found: list[Any]) -> None:
    inside: Any = ()
    if isinstance(value, functools.partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = value
    elif hasattr(value, "__dict__"):
        own = [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in _NOBODYS]
        for one in [one for kind in own for one in vars(kind).values() if isinstance(one, types.FunctionType)]:
            _look(one, 0, seen, found)
        of_all = _OF_MODULES if isinstance(value, nn.Module) else ()
        inside = [one for name, one in vars(value).items() if name not in of_all]
    for one in list(itertools.islice(inside, None if hasattr(value, "__dict__") else MOST)):
        _look(one, depth, seen, found)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(sorted(set(code.co_names).union(*map(_names_in, nested))))
