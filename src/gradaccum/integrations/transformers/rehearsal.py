"""Passes that only prove something: they leave no trace in a trainer's logs, and meet no other rank."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["rehearsing"]

LARGEST = 4096
"""Entries of a container that is copied."""

_CONTAINERS = (dict, list, set, deque)


class _Alone:
    """An accelerator that gathers from this rank alone."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, tensor: Any, use_gather_object: bool = False) -> Any:
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor


@contextlib.contextmanager
def rehearsing(trainer: Any, compute_loss: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`compute_loss` on a copy of its trainer, with counters and lists of numbers of its own.

    Args:
        trainer: The trainer.
        compute_loss: What it computes its loss by: a method of its own, or any function.
    """
    alone = copy.copy(trainer)
    own = vars(alone)
    for name, value in own.items():
        if isinstance(value, _CONTAINERS) and _is_small(value, [LARGEST]):
            own[name] = copy.deepcopy(value)
    own["accelerator"] = _Alone(trainer.accelerator)
    function = getattr(compute_loss, "__func__", None)
    bound = function is not None and getattr(compute_loss, "__self__", None) is trainer
    yield function.__get__(alone) if bound and function is not None else compute_loss


def _is_small(value: Any, left: list[int]) -> bool:
    """Whether this is numbers and names alone, in containers, and not too many."""
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(value, dict):
        return all(_is_small(item, left) for pair in value.items() for item in pair)
    if isinstance(value, _CONTAINERS):
        return all(_is_small(item, left) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
