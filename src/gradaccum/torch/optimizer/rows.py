"""What a batch weighs: its number of rows, or what the user says."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradaccum.core.window import Window, checked_weight
from gradaccum.on_torch.batch import children, has_rows, number_of_rows

__all__ = ["BatchWeight", "RowsBeside"]


class BatchWeight:
    """Weighs the batches of a loader, one after the other.

    Args:
        weight: `weight(batch) -> number`; None: the batch's number of rows.
        where: What the user passes `weight=` to.

    Raises:
        TypeError: `weight` is no callable.

    Example:
        >>> import torch
        >>> BatchWeight()((torch.zeros(16, 3), torch.zeros(16)))
        16.0
    """

    def __init__(self, weight: Callable[[Any], float] | None = None, where: str = "batches()") -> None:
        if weight is not None and not callable(weight):
            raise TypeError(f"`weight` must be a callable: weight(batch) -> number. Received: weight={weight!r}.")
        self._weight = weight
        self._where = where
        self._rows_in_front = False
        """Whether a batch has shown that its tensors have their rows in front."""

    @property
    def given(self) -> bool:
        """Whether the user says it, or it is the number of rows."""
        return self._weight is not None

    def __call__(self, batch: Any) -> float:
        """What this batch weighs.

        Raises:
            TypeError, ValueError: `weight` returned no such number; or the batch's rows cannot be told.
        """
        return float(self._rows(batch)) if self._weight is None else checked_weight(self._weight(batch))

    def _rows(self, batch: Any) -> int:
        rows = _rows_of_tensors(batch) if type(batch) in (tuple, list) else None
        try:
            if rows is None:
                rows = _number_of_rows(batch)
            if rows not in (1, 3, 4):
                self._rows_in_front = True
            elif not self._rows_in_front:
                _check_channels(batch)
        except ValueError as error:
            raise ValueError(
                f"{error}\nPass weight= to {self._where}: weight(batch) -> the number of its rows."
            ) from None
        return rows


def _number_of_rows(batch: Any) -> int:
    rows = set(_rows_of_leaves(batch))
    return rows.pop() if len(rows) == 1 else number_of_rows(batch)  # whose error lists what there is


def _rows_of_leaves(node: Any) -> Iterator[int]:
    if isinstance(node, PackedSequence):
        yield int(node.batch_sizes[0])
        return
    inside = children(node)
    for _, _, child in inside or ():
        yield from _rows_of_leaves(child)
    if inside is None and has_rows(node):
        yield int(node.shape[0])


def _check_channels(node: Any) -> None:
    """Raise if the tensors of a list look like images of different size: their first dimension is the channels."""
    inside = children(node)
    if not inside:
        return
    items = [child for _, _, child in inside]
    images = all(isinstance(item, Tensor) and item.dim() == 3 and item.is_floating_point() for item in items)
    if isinstance(node, (list, tuple)) and images and len({item.shape[1:] for item in items}) > 1:
        raise ValueError(
            f"A list of {len(items)} tensors of shapes {[tuple(item.shape) for item in items]} may be images of "
            "different sizes, whose first dimension is channels, not rows."
        )
    for item in items:
        _check_channels(item)


def _rows_of_tensors(batch: Iterable[Any]) -> int | None:
    """The rows of a flat sequence of tensors, as most loaders yield; None if this is none, or they disagree."""
    rows = None
    for leaf in batch:
        if not isinstance(leaf, Tensor):
            return None
        if leaf.dim():
            length = leaf.size(0)  # len() is written in Python
            if rows is None:
                rows = length
            elif rows != length:
                return None
    return rows


class RowsBeside:
    """Looks at the batches of other optimizers' `batches()`, inside of which this one's micro-batches are counted.

    Args:
        window: This optimizer's.
    """

    _filled: ClassVar[weakref.WeakSet[Window]] = weakref.WeakSet()
    """Windows that a loop of `batches()` fills, of all optimizers."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._before: weakref.WeakKeyDictionary[Window, float] = weakref.WeakKeyDictionary()
        self._warned = False

    def tell(self, filled: bool) -> None:
        """Whether a loop of `batches()` fills this optimizer's window from now on."""
        (self._filled.add if filled else self._filled.discard)(self._window)

    @property
    def any(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._filled) and not self._warned

    def look(self) -> None:
        """Warn, once, if this window counts another one's batches equally, and they differ."""
        window, before = self._window, self._before
        if window.weights_given or window.reduction == "sum":
            return
        others = [other for other in self._filled if other is not window]
        self._before = weakref.WeakKeyDictionary((other, other.micro_batch.default) for other in others)
        for other, rows in self._before.items():
            if window.micro_batches > 1 and rows != before.get(other, rows):
                self._warned = True
                warnings.warn(
                    "This optimizer steps inside of another one's batches(), which weigh differently (the last two "
                    f"{before[other]:g} and {rows:g}), and counts its micro-batches equally. Let both share the "
                    "batches, a.batches(b.batches(loader)), or use backward(loss, weight=...).",
                    stacklevel=4,
                )
                break
