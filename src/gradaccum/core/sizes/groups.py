"""Rows that belong together: pairs, groups, a query with its documents. They are never split."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from gradaccum.schedule import checked_count

__all__ = ["Groups"]


class Groups:
    """Which rows of a batch stay together; the rows of a group lie one behind the other.

    Example:
        >>> groups = Groups([7, 7, 7, 2, 2, 9])
        >>> groups.runs, groups.largest
        ([(7, 0, 3), (2, 3, 2), (9, 5, 1)], (7, 0, 3))
        >>> groups.cut(range(6), 4)
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.runs: list[tuple[int, int, int]] = []
        """Of each group its id, its first row, and its number of rows."""
        start = 0
        for group, rows in itertools.groupby(ids):
            size = len(list(rows))
            self.runs.append((group, start, size))
            start += size
        self._ends = [start + size for _, start, size in self.runs]

    @property
    def largest(self) -> tuple[int, int, int]:
        """The one of the most rows."""
        return max(self.runs, key=lambda run: run[2])

    def stop(self, start: int, wanted: int, most: int) -> int:
        """Where a micro-batch ends that begins at a group: after `wanted` rows or a few more, `most` at most.

        One group is the least.

        Example:
            >>> Groups([0, 0, 1, 1, 2, 2]).stop(0, wanted=3, most=5), Groups([0, 0, 1, 1, 2, 2]).stop(0, 3, 3)
            (4, 2)
        """
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._ends, start + wanted, first)
        if last >= len(self._ends) or (last > first and self._ends[last] - start > most):
            last -= 1
        return self._ends[last]

    def cut(self, rows: Sequence[int], size: int) -> list[list[int]]:
        """Lists of whole groups, of at most `size` rows together, one group at least; as even as comes easily."""
        units = [list(unit) for _, unit in itertools.groupby(rows, key=self.ids.__getitem__)]
        parts: list[list[int]] = [[]]
        left = len(rows)
        for unit in units:
            count = -(-left // max(size, 1))
            full = parts[-1] and (
                len(parts[-1]) + len(unit) > size or len(parts[-1]) * count >= left  # as many as the others will have
            )
            if full:
                left -= len(parts[-1])
                parts.append([])
            parts[-1] += unit
        return parts

    def alone(self, rows: Sequence[int]) -> int | None:
        """The group that these rows are, if they are one."""
        found = {self.ids[row] for row in (rows[0], rows[-1])}
        return found.pop() if len(found) == 1 else None

    def described(self, group: int) -> str:
        """A group, by name."""
        return f"group {group} ({self.ids.count(group)} rows)"  # which ones: they may have been brought together

    @classmethod
    def of_size(cls, rows: int, size: int) -> Groups:
        """So many rows in a row.

        Example:
            >>> Groups.of_size(6, 2).ids
            [0, 0, 1, 1, 2, 2]
        """
        checked_count(size, "groups")
        if rows % size:
            raise ValueError(
                f"groups={size} keeps {size} rows together, and the batch has {rows}, which is no multiple of it. Give "
                "the rows' group ids, as a tensor or by a callable, where groups differ in size."
            )
        return cls([row // size for row in range(rows)])
