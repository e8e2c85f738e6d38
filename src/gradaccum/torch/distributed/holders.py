"""Which optimizer holds back a model's reductions: the one that was built last."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

__all__ = ["release", "take"]

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def take(modules: Iterable[nn.Module], holder: object) -> None:
    """These modules are this holder's."""
    _HOLDERS.update({module: id(holder) for module in modules})


def release(modules: Iterable[nn.Module], holder: object) -> bool:
    """Whether these modules were still this holder's, and are nobody's now."""
    own = [module for module in modules if _HOLDERS.get(module) == id(holder)]
    for module in own:
        del _HOLDERS[module]
    return bool(own)
