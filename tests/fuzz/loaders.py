"""Loaders of many kinds over the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

FRESH = ("list", "generator", "iterator", "DataLoader", "workers", "stream", "stateful")
"""Loaders whose batches stay as they are once handed out."""


def loader_of(kind: str, batches: list[Any], faults: Iterable[int] = (), error: Any = None) -> Iterable[Any]:
    """The batches, as a loader of this kind hands them out; before some it raises this error, once."""
    if faults:
        return _Interrupted(batches, faults, error)
    if kind == "generator":
        return (batch for batch in batches)
    if kind == "iterator":
        return iter(batches)
    if kind.endswith("refilled"):
        return _refilled(batches, by_array=kind.startswith("array"))
    if kind == "stateful":
        return _Stateful(batches)
    if kind == "stream":
        return torch.utils.data.DataLoader(_Stream(batches), batch_size=None)
    if kind in ("DataLoader", "workers"):
        workers = 1 if kind == "workers" and len(batches) > 1 else 0
        return torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers)
    return batches


class _Interrupted:
    """An iterator that raises before some of its batches, and then goes on."""

    def __init__(self, batches: list[Any], faults: Iterable[int], error: Any) -> None:
        self.batches, self.faults, self.error, self.number = iter(batches), {*faults}, error, 0

    def __iter__(self) -> _Interrupted:
        return self

    def __next__(self) -> Any:
        if self.number in self.faults:
            self.faults.discard(self.number)
            raise self.error
        self.number += 1
        return next(self.batches)


class _Stream(torch.utils.data.IterableDataset):
    """Of unknown length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class _Stateful:
    """Knows where it is, and can go on from there."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.next = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def _refilled(batches: list[tuple[Any, ...]], by_array: bool) -> Iterator[tuple[Any, ...]]:
    """One buffer, refilled in place; through NumPy, PyTorch cannot see it."""
    most = max(len(batch[0]) for batch in batches)
    x, y = torch.empty(most, 5, dtype=batches[0][0].dtype), torch.empty(most, dtype=torch.long)
    for own_x, own_y, *rest in batches:
        for buffer, own in ((x, own_x), (y, own_y)):
            (buffer.numpy() if by_array else buffer)[: len(own)] = own
        yield (x[: len(own_x)], y[: len(own_y)], *rest)
