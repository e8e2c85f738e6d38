"""One epoch of a loader, seen by the optimizers whose windows its batches fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradaccum.on_torch.batch import number_of_rows
from gradaccum.window import checked_weight

if TYPE_CHECKING:
    from gradaccum.torch.optimizer.optimizer import Optimizer

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
        if any(optimizer is other.optimizer for other in others):
            raise ValueError("The batches of this loader fill this optimizer's windows already.")
        self.members: list[_Member] = [*others, _Member(optimizer, weight)]

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
        for member in self.members:
            member.begin(self)
        last, failure = False, None
        while not last and failure is None:
            batch = upcoming
            try:
                upcoming = next(iterator)
            except StopIteration:
                last = True
            except Exception as error:  # raised when the batch in hand has been trained on: it is a good one
                failure = error
            for member in self.members:
                member.expect(batch, last)
            try:
                yield batch
            except GeneratorExit:
                for member in self.members:
                    member.break_off(self)
                raise
            for member in self.members:
                member.optimizer._accumulation.skip()
        if failure is not None:
            raise failure
        for member in self.members:
            member.end(self)


class _Member:
    """An optimizer, and what the batches of an epoch mean for its windows."""

    def __init__(self, optimizer: Optimizer, weight: Callable[[Any], float] | None) -> None:
        self.optimizer = optimizer
        self.weight = weight
        self._over = True

    def begin(self, batches: Batches) -> None:
        """The first batch is there."""
        optimizer = self.optimizer
        before, optimizer._batches = optimizer._batches, None
        if optimizer._restored:
            optimizer._restored = False
        elif before is None:
            optimizer.flush()  # left over by a plain loop; the window ends with its epoch
        elif not (isinstance(batches.loader, Iterator) and before.loader is batches.loader):
            # The loop before was left by an exception. An iterator goes on where it was; a loader starts over.
            optimizer.discard()
        optimizer._batches = batches

    def expect(self, batch: Any, last: bool) -> None:
        """A batch is about to be handed out."""
        self._expect(_weight_of(batch, self.weight), self.weight is not None, last)

    def _expect(self, weight: float, given: bool, last: bool) -> None:
        optimizer, ranks = self.optimizer, self.optimizer._ranks
        self._over = last
        if ranks.several:
            alone = optimizer._batches is None or len(optimizer._batches.members) == 1
            self._over = ranks.agree_on_last(last, alone and not optimizer._loss_scale.known)
        optimizer._accumulation.expect(weight, given, self._over)
        if ranks.several:
            optimizer._expect(counts=weight > 0)

    def end(self, batches: Batches) -> None:
        """The loop has used the last batch."""
        optimizer = self.optimizer
        if optimizer._batches is not batches:
            return  # another loop has begun since
        while not self._over:  # the other ranks of a sharded model need this one in their passes
            self._expect(0.0, False, True)
            optimizer.zero_grad()
            optimizer._ranks.repeat()
            optimizer.step()
        optimizer._ranks.end_epoch()
        if optimizer._accumulation.window.is_open:
            optimizer.flush()  # the last micro-batch was skipped
        optimizer._keep_up()
        optimizer._end_epoch()

    def break_off(self, batches: Batches) -> None:
        """The loop was left before its end."""
        optimizer, window = self.optimizer, self.optimizer._accumulation.window
        if optimizer._batches is not batches:
            return
        optimizer._ranks.leave()
        if window.is_open or window.pending is not None:
            optimizer.discard()
        optimizer._end_epoch()


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
