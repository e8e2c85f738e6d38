"""What is used of torch's optimizers beyond their public API."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def global_step_hooks() -> tuple[dict[Any, Any], dict[Any, Any]]:
    module = sys.modules["torch.optim.optimizer"]  # torch.optim hides it
    return getattr(module, _GLOBAL_HOOKS[0], {}), getattr(module, _GLOBAL_HOOKS[1], {})


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[tuple[list[Any], list[Any]]]:
    """The hooks of every optimizer's step, before and after it; meanwhile no optimizer calls them by itself."""
    module, found = sys.modules["torch.optim.optimizer"], global_step_hooks()
    for name, table in zip(_GLOBAL_HOOKS, found, strict=True):
        if table:
            setattr(module, name, type(table)())
    try:
        yield [*found[0].values()], [*found[1].values()]
    finally:
        for name, table in zip(_GLOBAL_HOOKS, found, strict=True):
            if table:
                setattr(module, name, table)
