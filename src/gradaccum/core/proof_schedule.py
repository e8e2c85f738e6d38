"""When a batch is to be proven, and how many of its rows: all of a proof that an ordinary update runs."""

from __future__ import annotations

ROWS, ENOUGH = 16, 8
"""Rows of a proof at most; rows from which on more tell little."""
OFTEN = 1024
"""Batches after which a proof is repeated at the latest."""
ATTEMPTS = 8
"""Batches in a row with nothing to compare, before no more is tried."""


class ProofSchedule:
    """When a batch is to be proven, and how much of it: the first of each kind, and the 2nd, 4th, 8th, ... of all.

    The rows are cut into three parts, and where it is repeated into two, in one way and in the other.

    Example:
        >>> schedule = ProofSchedule()
        >>> [schedule.is_due(new_kind=number == 1) for number in range(1, 10)]
        [True, True, False, True, False, False, False, True, False]
    """

    def __init__(self) -> None:
        self.batches = 0
        self.repeated = False  # whether the latest batch is of a kind that has been proven
        self._postponed = False
        self._looked_at = self._repetitions = 0

    def is_due(self, new_kind: bool) -> bool:
        self.batches += 1
        self.repeated = not new_kind
        postponed, self._postponed = self._postponed, False
        return postponed or new_kind or self.batches & (self.batches - 1) == 0 or self.batches % OFTEN == 0

    def postpone(self) -> None:
        self._postponed = True

    def scope(self, size: int | None) -> tuple[int, int]:
        """Rows to look at, of a batch in micro-batches of `size` if that is known, and the way to cut them."""
        rows = ROWS if size is None else min(ROWS, max(ENOUGH, 2 * size))
        if size is not None and self.batches == 2:
            rows = max(rows, size)  # of what a micro-batch holds, some may begin above so many rows
        if not self.repeated or rows > self._looked_at:
            self._looked_at = rows
            return rows, 0
        self._repetitions += 1
        return min(rows, ENOUGH), 2 + self._repetitions % 2
