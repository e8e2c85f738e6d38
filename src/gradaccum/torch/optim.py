"""Wrap the optimizer: a loop that runs small batches makes the large batch's updates.

`Optimizer` wraps any `torch.optim.Optimizer`, and every class of `torch.optim` exists here in wrapped form:

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> SGD(model.parameters(), lr=0.1, steps=4).steps, SGD(4, model.parameters(), lr=0.1).steps
    (4, 4)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

from gradaccum.schedule import Schedule, Steps, signature_with_steps
from gradaccum.torch.optimizer import Optimizer

__all__ = ["Optimizer"]


_OWN = {name: p for name, p in inspect.signature(Optimizer).parameters.items() if p.kind is p.KEYWORD_ONLY}
"""The wrapper's keywords."""


def _named(inner: type[torch.optim.Optimizer]) -> type[Optimizer]:
    """`inner`, wrapped: its own arguments, and `steps` first or by keyword."""

    def __init__(self: Optimizer, *args: Any, steps: Steps | None = None, **kwargs: Any) -> None:
        if steps is None:
            first = args[0] if args else None
            if not isinstance(first, (int, float, str, Mapping, Schedule)) and not callable(first):
                raise TypeError(
                    f"`steps` is missing: {inner.__name__}(model.parameters(), steps=4), or "
                    f"{inner.__name__}(4, model.parameters())."
                )
            steps, args = args[0], args[1:]
        wrapping = {name: kwargs.pop(name) for name in _OWN.keys() & kwargs.keys()}
        Schedule(steps)  # a wrong one shall be told before the inner optimizer is made
        Optimizer.__init__(self, inner(*args, **kwargs), steps, **wrapping)

    doc = (
        f"`torch.optim.{inner.__name__}`, wrapped in `Optimizer`: `{inner.__name__}(params, ..., steps=4)`, or steps "
        f"first.\n\nTakes the arguments of `torch.optim.{inner.__name__}`, and those of `Optimizer` by keyword."
    )
    names = {
        "__init__": __init__,
        "__doc__": doc,
        "__module__": __name__,
        "__signature__": signature_with_steps(inner, _OWN),
    }
    return type(inner.__name__, (Optimizer,), names)


def __getattr__(name: str) -> type[Optimizer]:
    inner = getattr(torch.optim, name, None)
    if not (isinstance(inner, type) and issubclass(inner, torch.optim.Optimizer)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    globals()[name] = _named(inner)  # one class per name, so that pickle finds the same one again
    return globals()[name]


def __dir__() -> list[str]:
    named = [n for n, o in vars(torch.optim).items() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer)]
    return sorted({*__all__, *named, *(name for name in globals() if name.startswith("__"))})
