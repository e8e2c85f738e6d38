"""The weight of a batch: its number of rows, or what the user says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradaccum.core.window import checked_weight
from gradaccum.on_torch.batch import children, has_rows, number_of_rows

__all__ = ["BatchWeight"]


class BatchWeight:
    """Weighs the batches of a loader, one after the other.

    Example:
        >>> import torch
        >>> BatchWeight()((torch.zeros(16, 3), torch.zeros(16)))
        16.0
    """

    def __init__(self, weight: Callable[[Any], float] | None = None, where: str = "batches()") -> None:
        if weight is not None and not callable(weight):
            raise TypeError(f"`weight` must be a callable: weight(batch) -> number. Received: weight={weight!r}.")
        self._weight, self.given = weight, weight is not None
        self._where = where
        self._rows_in_front = False
        """Whether a batch has shown that its tensors have their rows in front."""

    def __call__(self, batch: Any) -> float:
        if self._weight is not None:
            return checked_weight(self._weight(batch))
        rows = self._flat_rows(batch)
        return float(self._rows(batch) if rows is None else rows)

    def _flat_rows(self, batch: Any) -> int | None:
        """The rows of a flat sequence of tensors, as most loaders yield; None if it is none, or needs a closer look."""
        rows = None
        if type(batch) is tuple or type(batch) is list:
            for leaf in batch:  # attributes alone: this runs for every batch
                if type(leaf) is not Tensor or not leaf.ndim:
                    return None
                if rows is None:
                    rows = leaf.shape[0]
                if rows != leaf.shape[0] or (leaf.ndim == 3 and rows in (1, 3, 4) and not self._rows_in_front):
                    return None
        self._rows_in_front = self._rows_in_front or rows not in (None, 1, 3, 4)
        return rows

    def _rows(self, batch: Any) -> int:
        try:
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
