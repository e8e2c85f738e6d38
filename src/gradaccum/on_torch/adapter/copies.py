"""Deep copies of what a user trains: functions are copied with the modules and tensors that they refer to."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["copied"]


def copied(thing: Any, memo: dict[int, Any], convert: Callable[[Any], Any]) -> Any:
    """A deep copy. Functions are copied with the modules and tensors they refer to, so that these stay untouched."""
    if isinstance(thing, (nn.Module, Tensor)):
        known = id(thing) in memo
        new = copy.deepcopy(thing, memo)
        if not known:
            memo[id(thing)] = new = convert(new)
        return new
    if isinstance(thing, types.FunctionType):
        return _copied_function(thing, memo, convert)
    if isinstance(thing, types.MethodType):
        return types.MethodType(copied(thing.__func__, memo, convert), copied(thing.__self__, memo, convert))
    if isinstance(thing, functools.partial):
        arguments = [copied(value, memo, convert) for value in thing.args]
        keywords = {name: copied(value, memo, convert) for name, value in thing.keywords.items()}
        return functools.partial(copied(thing.func, memo, convert), *arguments, **keywords)
    return thing


def _copied_function(function: types.FunctionType, memo: dict[int, Any], convert: Callable[[Any], Any]) -> Any:
    if id(function) in memo:
        return memo[id(function)]
    kept = (nn.Module, Tensor, functools.partial)
    used = {
        name: copied(function.__globals__[name], memo, convert)
        for name in _names(function.__code__)
        if isinstance(function.__globals__.get(name), kept)
    }
    cells = []
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            content = None
        inside = isinstance(content, (*kept, types.FunctionType)) and content is not function
        cells.append(types.CellType(copied(content, memo, convert)) if inside else cell)
    new = types.FunctionType(
        function.__code__,
        {**function.__globals__, **used} if used else function.__globals__,
        function.__name__,
        tuple(copied(value, memo, convert) for value in function.__defaults__) if function.__defaults__ else None,
        tuple(cells) or None,
    )
    new.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = new
    return new


def _names(code: types.CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_names(inner) for inner in nested))
