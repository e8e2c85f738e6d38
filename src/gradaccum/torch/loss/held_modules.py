"""The modules that a loss refers to besides the model: a criterion in its closure, a teacher among its globals."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from gradaccum.on_torch.held import MOST, names_of

__all__ = ["held_modules"]


def held_modules(function: Any, model: Any = None) -> dict[str, nn.Module]:
    """The modules that a function refers to, by what it calls them; without the model, its parts, and what holds it.

    Looked through are closures, globals by name, defaults, arguments of `functools.partial`, the object of a method,
    attributes of a callable object, and functions among all these that come from the same file.

    Example:
        >>> criterion, model = nn.BCEWithLogitsLoss(), nn.Linear(2, 1)
        >>> held_modules(lambda model, x, y: criterion(model(x), y), model)
        {'criterion': BCEWithLogitsLoss()}
    """
    parts = set(map(id, model.modules())) if isinstance(model, nn.Module) else set()
    found: dict[str, nn.Module] = {}
    for name, module in _referred(function, "", set()):
        known = any(module is other for other in found.values())
        if not known and id(module) not in parts and not any(inner is model for inner in module.modules()):
            found.setdefault(name, module)
    return found


def _referred(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield name, value
        return
    for key, inner in _inside(value, name):
        yield from _referred(inner, key, seen)


def _inside(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a function, a container or an object refers to, by what it is called."""
    if isinstance(value, functools.partial):
        arguments: dict[Any, Any] = {**dict(enumerate(value.args)), **value.keywords}
        yield from ((f"{name}.{key}".lstrip("."), inner) for key, inner in arguments.items())
        yield name, value.func
    elif isinstance(value, types.MethodType):
        yield name or "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, types.FunctionType):
        for key, inner in names_of(value):
            nested = isinstance(inner, types.FunctionType)
            if not nested or inner.__globals__ is value.__globals__:
                yield key, inner
    elif isinstance(value, (list, tuple, dict)):
        items = (value if isinstance(value, dict) else dict(enumerate(value))).items()
        modules = [(key, inner) for key, inner in itertools.islice(items, MOST) if isinstance(inner, nn.Module)]
        yield from ((f"{name}.{key}", inner) for key, inner in modules)
    elif not name and hasattr(value, "__dict__") and not isinstance(value, type):  # the loss is an object of a class
        yield from vars(value).items()
        yield name, vars(type(value)).get("__call__")
