"""How a large batch is cut into micro-batches."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from gradaccum.schedule import checked_count

__all__ = ["FixedSize", "best_fit", "even_size", "even_sizes", "packed"]


def even_sizes(rows: int, micro_batch_size: int) -> list[int]:
    """Sizes of the fewest micro-batches of at most `micro_batch_size` rows, as even as can be.

    There are at most two distinct sizes, one row apart, the larger ones first: a compiler sees two shapes at most.

    Example:
        >>> even_sizes(100, 48), even_sizes(64, 16), even_sizes(3, 16)
        ([34, 33, 33], [16, 16, 16, 16], [3])
    """
    checked_count(rows, "rows", least=0)
    checked_count(micro_batch_size, "micro_batch_size")
    if rows == 0:
        return []
    count = -(-rows // micro_batch_size)
    size, larger = divmod(rows, count)
    return [size + 1] * larger + [size] * (count - larger)


def even_size(rows: int, micro_batch_size: int) -> int:
    """The first of `even_sizes`; applied to the rows that are left, again and again, it gives all of them.

    Example:
        >>> even_size(100, 48), even_size(66, 48), even_size(33, 48)
        (34, 33, 33)
    """
    return -(-rows // -(-rows // micro_batch_size))


class FixedSize:
    """A micro-batch size that the user chose, halved when it runs out of memory. The interface of `SizeSearch`.

    Example:
        >>> fixed = FixedSize(48)
        >>> fixed.next_size(100)
        34
        >>> fixed.failed(34)
        >>> fixed.size, fixed.next_size(100)
        (17, 17)
    """

    settled = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.minimum = 1
        """The fewest rows that can be evaluated."""
        self.ceiling: int | None = None
        """The largest size that may be tried: below one that failed."""

    def next_size(self, rows: int) -> int:
        """The size of the next micro-batch, where `rows` are left in the window."""
        return even_size(rows, self.size)

    def record(self, size: int, seconds: float, base: float | None = None, peak: float | None = None) -> None:
        """Ignored: the size is given."""

    def failed(self, size: int) -> None:
        """Record that a micro-batch of `size` rows ran out of memory."""
        smaller = max(size // 2, min(2, size - 1), 1)  # three become two: BatchNorm can't normalise one alone
        self.size = self.ceiling = max(min(smaller, self.size), self.minimum)

    def close(self) -> None:
        """End the window."""


def packed(
    extents: Sequence[tuple[int, int]],
    max_tokens: int,
    max_rows: int | None = None,
    units: Sequence[list[int]] | None = None,
) -> list[tuple[list[int], int, int]]:
    """Rows of different lengths, sorted and packed into micro-batches of at most `max_tokens` padded tokens.

    Example:
        >>> packed([(0, 3), (0, 9), (0, 4), (0, 4)], max_tokens=12)
        [([1], 0, 9), ([2, 3, 0], 0, 4)]
    """
    ends = [
        (min(extents[row][0] for row in unit), max(max(extents[row][1], extents[row][0] + 1) for row in unit), unit)
        for unit in (units if units is not None else [[row] for row in range(len(extents))])
    ]
    packs: list[tuple[list[int], int, int]] = []
    rows: list[int] = []
    start = stop = 0
    for first, last, unit in sorted(ends, key=lambda end: (end[0] - end[1], end[2][0])):
        count, columns = len(rows) + len(unit), max(stop, last) - min(start, first)
        if rows and count * columns <= max_tokens and (max_rows is None or count <= max_rows):
            start, stop = min(start, first), max(stop, last)
            rows = rows + unit
        else:
            if rows:
                packs.append((rows, start, stop))
            rows, start, stop = unit, first, last
    return [*packs, (rows, start, stop)] if rows else []


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in as few packed rows as comes easily: the longest first, each into the fullest one that has room for it.

    Example:
        >>> best_fit([3, 9, 4, 2, 5], 9)
        [[1], [4, 2], [0, 3]]
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """Of each packed row the tokens that fit into it still, and its place; sorted."""
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place < len(room):
            left, pack = room.pop(place)
            packs[pack].append(row)
        else:
            left, pack = capacity, len(packs)
            packs.append([row])
        if left > lengths[row]:
            bisect.insort(room, (left - lengths[row], pack))
    return sorted(packs, key=lambda pack: -sum(lengths[row] for row in pack))
