"""What a function, a module or an object reaches: the generators, modules and tensors that its passes may use."""

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

MOST = 64
"""Items of a list or a dict that are looked at."""

_DEEPEST = 3
"""Containers and objects inside of each other that are looked through."""

_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), enum.Enum, types.ModuleType, torch.dtype, torch.device)

_NOBODYS = ("builtins", "torch", "keras", "transformers", "gradaccum")
"""Packages whose code draws from generators that it is given, and takes long to look through."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def names_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to by name: its closure, globals, and the defaults of its arguments."""
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
    if isinstance(value, (*_PLAIN, type)) or id(value) in seen:
        return
    seen.add(id(value))
    inside: list[Any] = []
    if is_generator(value):
        found.append(value)
    elif isinstance(value, types.FunctionType):
        named = [inner for _, inner in names_of(value)]
        inside = [f for f in named if not isinstance(f, types.FunctionType) or f.__globals__ is value.__globals__]
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, nn.Module):
        seen.update(map(id, value.modules()))
        inside, depth = [one for module in value.modules() for one in _inside(module)], 0
    elif depth < _DEEPEST:
        inside, depth = _inside(value), depth + 1
    for one in inside:
        _look(one, 0 if isinstance(one, types.FunctionType) else depth, seen, found)


def _inside(value: Any) -> list[Any]:
    """What is in a container or an object; of an object, the functions of its own classes, too."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(itertools.islice(value.values(), MOST))
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(itertools.islice(value, MOST))
    if not hasattr(value, "__dict__"):
        return []
    own = [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in _NOBODYS]
    functions = [one for kind in own for one in vars(kind).values() if isinstance(one, types.FunctionType)]
    of_all = _OF_MODULES if isinstance(value, nn.Module) else ()
    return functions + [one for name, one in list(vars(value).items()) if name not in of_all]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(sorted(set(code.co_names).union(*map(_names_in, nested))))
