"""The search for the fastest micro-batch size that fits: measurements in, sizes out. Plain Python.

Any split gives the same update, so searching costs no exactness: every measurement is a real micro-batch. Sizes double
from one row on; the fastest are measured again; the search ends within two windows. What a size needs is predicted
before it is tried: above a knee, the peak memory is affine in the size.
"""

from __future__ import annotations

import math
import statistics

from gradaccum.core.sizes.even import even_size

__all__ = ["MARGIN", "MemoryLine", "SizeSearch"]

MARGIN = 0.1
"""Part of a memory limit that predicted peaks leave free: allocators round up and leave fragments, kernels have
workspaces, a CUDA context takes some."""
WORTH_REPEATING = 2.0
"""Sizes that take at most this many times the best's seconds per row are measured again: first runs are slow."""
REPEATED = 4
"""At most this many sizes are measured again."""
SAMPLES = 3
"""Measurements of each of them."""
CLEARLY = 0.95
"""A size that the first window had no rows for is tried only if larger sizes have been this much faster so far."""
WINDOWS = 2
"""The search ends with this window."""


class MemoryLine:
    """Peak memory as a function of the micro-batch size: `base + slope * size`, above a knee.

    Below the knee something else sets the peak (the optimizer, a kernel's workspace), so small sizes tell too little
    about the slope: the line goes through the two largest sizes, or from `base` through the only one.

    Example:
        >>> line = MemoryLine(base=100)
        >>> for size, peak in ((1, 300), (2, 300), (4, 500), (8, 900)):
        ...     line.add(size, peak)
        >>> line.predict(16), line.largest(1000)
        (1700.0, 9)
    """

    def __init__(self, base: float = 0.0) -> None:
        self.base = base
        self.peaks: dict[int, float] = {}

    def add(self, size: int, peak: float) -> None:
        """Record the peak of a micro-batch of `size` rows, in bytes."""
        self.peaks[size] = max(peak, self.peaks.get(size, 0.0))

    @property
    def slope(self) -> float:
        """Bytes per row."""
        sizes = sorted(self.peaks)[-2:]
        if not sizes:
            return 0.0
        last = sizes[-1]
        from_base = max(self.peaks[last] - self.base, 0.0) / last
        if len(sizes) < 2:
            return from_base
        between = (self.peaks[last] - self.peaks[sizes[0]]) / (last - sizes[0])
        return between if between > 0 else from_base

    def predict(self, size: int) -> float:
        """The peak at this size, in bytes."""
        if not self.peaks:
            return self.base
        last = max(self.peaks)
        return self.peaks[last] + self.slope * (size - last)

    def largest(self, limit: float) -> int | None:
        """The largest size whose predicted peak is within `limit` bytes; None where no limit is in sight."""
        if not self.peaks or self.slope <= 0:
            return None
        last = max(self.peaks)
        return max(math.floor(last + (limit - self.peaks[last]) / self.slope), 0)


class SizeSearch:
    """The search for one shape of batch.

    Ask `next_size` for the size of the next micro-batch, `record` what it took, and call `close` at the window's end.

    Example:
        >>> search = SizeSearch()
        >>> for window in range(2):
        ...     rows = 64
        ...     while rows:
        ...         size = search.next_size(rows)
        ...         search.record(size, seconds=1.0 + 0.1 * size + 0.02 * size**2)
        ...         rows -= size
        ...     search.close()
        >>> search.settled, search.size
        (True, 8)
    """

    def __init__(self, start: int = 1, limit: float | None = None, minimum: int = 1) -> None:
        start = max(start, minimum)
        self.limit = limit
        self.minimum = minimum
        self.line: MemoryLine | None = None
        self.ceiling: int | None = None
        """The largest size that may be tried: below one that failed."""
        self.settled = False
        self.rows = 0
        self.size = start
        """The best size so far; once settled, the one to use."""
        self._seconds: dict[int, float] = {}
        self._repeated: dict[int, list[float]] = {}
        self._candidate: int | None = start
        self._again: list[int] = []
        self._windows = 0
        self._window_rows = 0

    @property
    def summary(self) -> str:
        """The measurements, in a line."""
        costs = ", ".join(f"{size}: {1e3 * self._cost(size):.3g}" for size in sorted(self._seconds))
        return f"Milliseconds per row by size: {costs}." if costs else ""

    def next_size(self, rows: int) -> int:
        """The size of the next micro-batch, where `rows` are left in the window."""
        size = max(self._wanted(rows), min(self.minimum, rows))
        left = rows - size
        if 0 < left < self.minimum:  # neither this one nor the next may be smaller than the minimum
            size = size - self.minimum + left if size - self.minimum + left >= self.minimum else rows
        return size

    def _wanted(self, rows: int) -> int:
        self._window_rows = max(self._window_rows, rows)
        if not self.settled:
            if self._candidate is not None:
                if self._candidate <= rows:
                    return self._candidate
            else:
                # The same number of rows for each: one lucky micro-batch of few rows must not decide.
                fitting = [size for size in self._again if size <= rows]
                if fitting:
                    return min(fitting, key=lambda size: (size * len(self._repeated.get(size, ())), -size))
        return even_size(rows, self.size)

    def record(self, size: int, seconds: float, base: float | None = None, peak: float | None = None) -> None:
        """Record a micro-batch of `size` rows: its seconds, and the bytes in use before it and at its peak."""
        if size == self._candidate:
            self._seconds[size] = seconds
        elif size in self._again:
            self._repeated.setdefault(size, []).append(seconds)
        if base is not None and peak is not None:
            self.line = self.line or MemoryLine(base)
            self.line.add(size, peak)
        if size == self._candidate:
            self._after_candidate(size)
        elif self._candidate is None and all(len(self._repeated.get(again, ())) >= SAMPLES for again in self._again):
            self._settle()

    def failed(self, size: int) -> None:
        """Record that a micro-batch of `size` rows ran out of memory."""
        self.ceiling = min(self.ceiling or size, max(size - 1, 1))
        self._seconds = {known: seconds for known, seconds in self._seconds.items() if known <= self.ceiling}
        self._repeated = {known: seconds for known, seconds in self._repeated.items() if known <= self.ceiling}
        self._again = [again for again in self._again if again <= self.ceiling]
        largest = max(self._seconds, default=0)
        if self.settled or self._candidate is None:
            self.size = self._best() if self._seconds else max(size // 2, 1)
            self.settled = self.settled or not self._again
        elif largest:  # between what fitted and what didn't
            self._candidate = None
            self._measure_again()
        else:
            self._candidate = self.size = max(size // 2, 1)

    def close(self) -> None:
        """End the window."""
        self._windows += 1
        if self.settled or not self._seconds:
            return
        if self._candidate is not None:
            self._candidate = min(self._candidate, self._window_rows)
            if self._candidate in self._seconds or not self._promising():
                self._candidate = None
                self._measure_again()
        if self._windows >= WINDOWS:
            self._settle()

    def _after_candidate(self, size: int) -> None:
        self.size = self._best()
        following = 2 * size
        if self.ceiling is not None:
            following = min(following, self.ceiling)
        if self.limit is not None and self.line is not None:
            usable = (1 - MARGIN) * self.limit
            if self.line.predict(following) > usable:
                following = min(following, self.line.largest(usable) or 1)
        if following <= size or self._windows > 0:
            self._candidate = None
            self._measure_again()
        else:
            self._candidate = following

    def _promising(self) -> bool:
        # It takes most of the second window.
        *smaller, largest = sorted(self._seconds)
        return all(self._cost(largest) < CLEARLY * self._cost(size) for size in smaller)

    def _measure_again(self) -> None:
        best = self._cost(self._best())
        near = [size for size in self._seconds if self._cost(size) <= WORTH_REPEATING * best]
        self._again = sorted(near, key=self._cost)[:REPEATED]
        if len(self._again) == 1:
            self._settle()

    def _settle(self) -> None:
        self.size, self.settled, self._candidate = self._best(), True, None

    def _cost(self, size: int) -> float:
        """Seconds per row: the mean of the repeated measurements.

        Of a size that was measured once, the median of its own and its neighbours': time per row is smooth in the
        size, so an outlier is another program's work, or luck.
        """
        if size in self._repeated:
            return sum(self._repeated[size]) / len(self._repeated[size]) / size
        sizes = sorted(self._seconds)
        place = sizes.index(size)
        near = [self._seconds[known] / known for known in sizes[max(place - 1, 0) : place + 2]]
        return statistics.median(near) if len(near) == 3 else near[-1] if place else max(near)

    def _best(self) -> int:
        return min(self._seconds, key=self._cost)
