"""One epoch of a loader, seen by the optimizers whose windows its batches fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradaccum.torch.batch import number_of_rows
from gradaccum.window import checked_weight

if TYPE_CHECKING:
    from gradaccum.torch.optimizer import Optimizer

__all__ = ["Batches"]


class Batches:
    """The loader's batches, unchanged and in order, with one fetched ahead: so the last one is known to be the last.

    Args:
        loader: Any iterable, sized or not; or another optimizer's `Batches`, which are then shared: both see the batch
            that is in use, not the one that is ahead.
        optimizer: Whose windows the batches fill.
        weight: `weight(batch) -> number`; None: the batch's number of rows.
    """

    def __init__(
        self, loader: Iterable[Any], optimizer: Optimizer, weight: Callable[[Any], float] | None = None
    ) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"`loader` must be iterable. Received: loader of type {type(loader).__name__}.")
        if weight is not None and not callable(weight):
            raise TypeError(f"`weight` must be a callable: weight(batch) -> number. Received: weight={weight!r}.")
        self.loader: Iterable[Any] = loader.loader if isinstance(loader, Batches) else loader
        others = loader.members if isinstance(loader, Batches) else []
        if any(optimizer is other for other, _ in others):
            raise ValueError("The batches of this loader fill this optimizer's windows already.")
        self.members: list[tuple[Optimizer, Callable[[Any], float] | None]] = [*others, (optimizer, weight)]

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # an unsized loader's own error is the right one

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        try:
            upcoming = next(iterator)
        except StopIteration:
            raise ValueError(
                f"The loader yielded no batch. Received: loader of type {type(self.loader).__name__}. "
                "An iterator can be used only once; pass what makes a new one for each epoch."
            ) from None
        for optimizer, _ in self.members:
            optimizer._begin_epoch(self)
        last, failure = False, None
        while not last and failure is None:
            batch = upcoming
            try:
                upcoming = next(iterator)
            except StopIteration:
                last = True
            except Exception as error:  # raised when the batch in hand has been trained on: it is a good one
                failure = error
            for optimizer, weight in self.members:
                optimizer._begin_micro_batch(_weight_of(batch, weight), weight is not None, last)
            try:
                yield batch
            except GeneratorExit:
                for optimizer, _ in self.members:
                    optimizer._end_epoch(self, broken_off=True)
                raise
            for optimizer, _ in self.members:
                optimizer._end_micro_batch()
        if failure is not None:
            raise failure
        for optimizer, _ in self.members:
            optimizer._end_epoch(self)


def _weight_of(batch: Any, weight: Callable[[Any], float] | None) -> float:
    if weight is not None:
        return checked_weight(weight(batch))
    rows = _rows_of_tensors(batch) if type(batch) in (tuple, list) else None
    if rows is not None:
        return float(rows)
    try:
        return float(number_of_rows(batch))
    except ValueError as error:
        raise ValueError(f"{error}\nPass weight= to batches(): weight(batch) -> the number of its rows.") from None


def _rows_of_tensors(batch: Iterable[Any]) -> int | None:
    """The rows of a flat sequence of tensors, as most loaders yield; None if this is none, or they disagree."""
    rows = None
    for leaf in batch:
        if not isinstance(leaf, Tensor):
            return None
        if leaf.dim():
            if rows is None:
                rows = len(leaf)
            elif rows != len(leaf):
                return None
    return rows
