"""Even sizes of micro-batches, and the size that the user chose."""

from __future__ import annotations

from typing import Any

Sizer = Any
"""A `FixedSize` or a `SizeSearch`."""


def even_sizes(rows: int, micro_batch_size: int) -> list[int]:
    """Sizes of the fewest micro-batches of at most `micro_batch_size` rows, as even as can be.

    There are at most two distinct sizes, one row apart, the larger ones first: a compiler sees two shapes at most.

    Example:
        >>> even_sizes(100, 48), even_sizes(64, 16), even_sizes(3, 16)
        ([34, 33, 33], [16, 16, 16, 16], [3])
    """
    if rows == 0:
        return []
    count = -(-rows // micro_batch_size)
    size, larger = divmod(rows, count)
    return [size + 1] * larger + [size] * (count - larger)


def even_size(rows: int, micro_batch_size: int) -> int:
    """The first of `even_sizes`; applied to the rows that are left, again and again, it gives all of them."""
    return -(-rows // -(-rows // micro_batch_size))


class FixedSize:
    """A micro-batch size that the user chose, halved when it runs out of memory. The interface of `SizeSearch`."""

    settled = True
    searched = False

    def __init__(self, size: int) -> None:
        self.size, self.minimum = size, 1
        self.ceiling: int | None = None
        """The largest size that may be tried: below one that failed."""

    def next_size(self, rows: int) -> int:
        return even_size(rows, self.size)

    def record(self, size: int, seconds: float, base: float | None = None, peak: float | None = None) -> None:
        """Ignored: the size is given."""

    def failed(self, size: int) -> None:
        """Record that a micro-batch of `size` rows ran out of memory."""
        smaller = max(size // 2, min(2, size - 1), 1)  # three become two: BatchNorm can't normalise one alone
        self.size = self.ceiling = max(min(smaller, self.size), self.minimum)

    def close(self) -> None:
        """End the window."""
