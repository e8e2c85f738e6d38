"""Which optimizers take a data-parallel model's gradients, and hooks that keep none of them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["release", "take", "weakly"]

_OWNERS: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""By module, the one that took it last at the end."""


def take(modules: Iterable[nn.Module], owner: Any) -> list[Any]:
    """These modules are this owner's, too. Returns the others, the oldest first."""
    others = dict[int, Any]()
    for module in modules:
        found = [one for one in (ref() for ref in _OWNERS.get(module, [])) if one is not None and one is not owner]
        others.update({id(one): one for one in found})
        _OWNERS[module] = [*map(weakref.ref, found), weakref.ref(owner)]
    return list(others.values())


def release(modules: Iterable[nn.Module], owner: Any) -> bool:
    """Take this owner away from these modules. Returns whether it was the last that had taken any of them."""
    was_last = False
    for module in modules:
        found = [one for one in (ref() for ref in _OWNERS.get(module, [])) if one is not None]
        was_last |= bool(found) and found[-1] is owner
        _OWNERS[module] = [weakref.ref(one) for one in found if one is not owner]
    return was_last


def weakly(function: Callable[..., Any], owner: Any = None) -> Callable[..., Any]:
    """A hook that calls this method, or this function of its owner, as long as that is alive; None afterwards."""
    if owner is None:
        owner, function = function.__self__, function.__func__  # type: ignore[attr-defined]
    this = weakref.ref(owner)

    def hook(*args: Any) -> Any:
        alive = this()
        return None if alive is None else function(alive, *args)

    return hook
