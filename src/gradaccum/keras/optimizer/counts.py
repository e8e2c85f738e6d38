"""What the open window of a Keras optimizer has seen: a handful of integers, in one variable beside its sums.

A training step that is compiled cannot keep them in Python. So they travel as one vector of integers, and the rules of
a window are written once, in arithmetic that numbers and traced tensors both understand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras import ops

__all__ = ["Counts", "minimum", "where"]


class Counts(NamedTuple):
    """The integers of the open window; each a number, or a traced scalar.

    Example:
        >>> Counts.opened(steps=4, rows_left=0)
        Counts(micro_batches=0, steps=4, next_steps=4, weight=0, updated=0, rows_left=0)
    """

    micro_batches: Any
    """Micro-batches in it."""
    steps: Any
    """Micro-batches that close it."""
    next_steps: Any
    """Steps of the window after it."""
    weight: Any
    """What its micro-batches weigh together: rows where they are known, else their number."""
    updated: Any
    """1 if the last micro-batch made an update, else 0."""
    rows_left: Any
    """Rows of this epoch that are still to come, for an optimizer that knows them; else 0."""

    @classmethod
    def opened(cls, steps: Any, rows_left: Any, updated: Any = 0) -> Counts:
        """An empty window of so many steps."""
        return cls(0, steps, steps, 0, updated, rows_left)

    def added(self, weight: Any) -> Counts:
        """With one more micro-batch in it."""
        return self._replace(micro_batches=self.micro_batches + 1, weight=self.weight + weight, updated=0)

    def closed(self, updated: Any = 1) -> Counts:
        """The empty window that follows."""
        return Counts.opened(self.next_steps, self.rows_left, updated)


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """`then if condition else otherwise`, of numbers and of traced scalars."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    return ops.where(condition, then, otherwise)


def minimum(one: Any, other: Any) -> Any:
    """The smaller one, of numbers and of traced scalars."""
    return where(one < other, one, other)
