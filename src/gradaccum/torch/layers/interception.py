"""Calls of modules, on their way to somebody else."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["Call", "called", "intercepted"]

Call = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Gets a module's place, and what it is called with; returns the outputs."""

_handlers: dict[int, Callable[..., Any]] = {}
"""Of each module, by id, who gets its calls."""


@contextlib.contextmanager
def intercepted(modules: Sequence[nn.Module], handle: Call) -> Iterator[None]:
    """Calls of these modules go to `handle` meanwhile, those by hooks and wrappers of their class among them.

    Inside of another one, calls go to the inner one alone.

    A module's class is another one meanwhile, of the same name: it is the class that Python looks at for `__call__`,
    and classes such as transformers' checkpointed layers have one of their own, which a call from inside of `handle`
    must run.

    Example:
        >>> layers = [nn.Linear(2, 2), nn.Tanh()]
        >>> with intercepted(layers, lambda place, args, kwargs: f"{place}: {args}"):
        ...     layers[1](7)
        '1: (7,)'
    """
    held = [(module, type(module), _handlers.get(id(module))) for module in modules]
    try:
        for place, module in enumerate(modules):
            _handlers[id(module)] = functools.partial(_handled, handle, place)
            if not hasattr(type(module), "_gradaccum_own"):
                module.__class__ = _intercepting(type(module))  # type: ignore[arg-type]  # a class is hashable
        yield
    finally:
        for module, own, before in held:
            if module.__class__ is not own:
                module.__class__ = own
            if before is None:
                _handlers.pop(id(module), None)
            else:
                _handlers[id(module)] = before


def _handled(handle: Call, place: int, *args: Any, **kwargs: Any) -> Any:
    return handle(place, args, kwargs)


def called(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The module's own outputs, whether its calls are intercepted or not."""
    own = type(module)
    return getattr(own, "_gradaccum_own", own).__call__(module, *args, **kwargs)


@functools.cache
def _intercepting(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get(id(self))
        return own.__call__(self, *args, **kwargs) if handler is None else handler(*args, **kwargs)

    names = {
        "__call__": call,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "_gradaccum_own": own,
    }
    return types.new_class(own.__name__, (own,), exec_body=lambda body: body.update(names))
