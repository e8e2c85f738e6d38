"""Searches for the fastest size of a micro-batch that fits.

Any split gives the same update, so searching costs no exactness: every measurement is a real micro-batch. Sizes double
from one row on; the fastest are measured again; the search ends within two windows. What a size needs is predicted
before it is tried: above a knee, the peak memory is affine in the size.

Where updates are compiled as a whole, a few sizes are compiled and timed beforehand: `fastest_size`.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from gradaccum.core.sizes.fixed import even_size
from gradaccum.core.sizes.memory import MARGIN, DoesNotFit, format_bytes

logger = logging.getLogger("gradaccum")

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
STEP = 4
"""Sizes that are compiled are tried in steps of this factor, and the double and the half of the best one after that."""
SMALLEST_PART = 64
"""The first of them is this part of the rows."""
WORSE = 1.05
"""A size that takes so much longer than the best one is slower, not noise."""
QUICK = 0.2
"""Seconds below which a program is timed three times."""


class MemoryLine:
    """Peak memory as a function of the micro-batch size: `base + slope * size`, above a knee.

    Below the knee something else sets the peak (the optimizer, a kernel's workspace), so small sizes tell too little
    about the slope: the line goes through the two largest sizes, or from `base` through the only one.
    """

    def __init__(self, base: float = 0.0) -> None:
        self.base = base
        self.peaks: dict[int, float] = {}

    def add(self, size: int, peak: float) -> None:
        self.peaks[size] = max(peak, self.peaks.get(size, 0.0))

    @property
    def slope(self) -> float:
        if not self.peaks:
            return 0.0
        *_, first, last = [0, *sorted(self.peaks)]
        between = (self.peaks[last] - self.peaks[first]) / (last - first) if first else 0.0
        return between if between > 0 else max(self.peaks[last] - self.base, 0.0) / last

    def predict(self, size: int) -> float:
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
    """

    searched = True

    def __init__(self, start: int = 1, limit: float | None = None, minimum: int = 1) -> None:
        self.limit, self.minimum = limit, minimum
        self.line: MemoryLine | None = None
        self.ceiling: int | None = None
        """The largest size that may be tried: below one that failed."""
        self.settled, self.size = False, max(start, minimum)
        """The best size so far; once settled, the one to use."""
        self._seconds = dict[int, list[float]]()
        """Of each size, what its micro-batches took: the first one, then those that were measured again."""
        self._candidate: int | None = self.size
        self._again = list[int]()
        self._windows = self._window_rows = 0

    @property
    def summary(self) -> str:
        costs = ", ".join(f"{size}: {1e3 * self._cost(size):.3g}" for size in sorted(self._seconds))
        return f"Milliseconds per row by size: {costs}." if costs else ""

    def next_size(self, rows: int) -> int:
        size = max(self._wanted(rows), min(self.minimum, rows))
        left = rows - size
        if 0 < left < self.minimum:  # neither this one nor the next may be smaller than the minimum
            size = size - self.minimum + left if size - self.minimum + left >= self.minimum else rows
        return size

    def _wanted(self, rows: int) -> int:
        self._window_rows = max(self._window_rows, rows)
        trying = self._again if self._candidate is None else [self._candidate]
        if not self.settled and (fitting := [size for size in trying if size <= rows]):
            # The same number of rows for each: one lucky micro-batch of few rows must not decide.
            return min(fitting, key=lambda size: (size * len(self._seconds.get(size, [])[1:]), -size))
        return even_size(rows, self.size)

    def record(self, size: int, seconds: float, base: float | None = None, peak: float | None = None) -> None:
        """Record a micro-batch of `size` rows: its seconds, and the bytes in use before it and at its peak."""
        if base is not None and peak is not None:
            self.line = self.line or MemoryLine(base)
            self.line.add(size, peak)
        if size == self._candidate:
            self._seconds[size] = [seconds]
            self.size = self._best()
            self._climb(size)
            return
        if size in self._again:
            self._seconds[size].append(seconds)
        if self._candidate is None and all(len(self._seconds[again]) > SAMPLES for again in self._again):
            self._settle()

    def _climb(self, size: int) -> None:
        following = min(2 * size, self.ceiling or 2 * size)
        if self.limit is not None and self.line is not None:
            usable = (1 - MARGIN) * self.limit
            if self.line.predict(following) > usable:
                following = min(following, self.line.largest(usable) or 1)
        if following <= size or self._windows > 0:
            self._measure_again()
        else:
            self._candidate = following

    def failed(self, size: int) -> None:
        """Record that a micro-batch of `size` rows ran out of memory."""
        self.ceiling = ceiling = min(self.ceiling or size, max(size - 1, 1))
        self._seconds = {known: seconds for known, seconds in self._seconds.items() if known <= ceiling}
        self._again = [again for again in self._again if again <= ceiling]
        if self.settled or self._candidate is None:
            self.size = self._best() if self._seconds else max(size // 2, 1)
            self.settled = self.settled or not self._again
        elif self._seconds:  # between what fitted and what didn't
            self._measure_again()
        else:
            self._candidate = self.size = max(size // 2, 1)

    def close(self) -> None:
        self._windows += 1
        if self.settled or not self._seconds:
            return
        if self._candidate is not None:
            self._candidate = min(self._candidate, self._window_rows)
            *smaller, largest = sorted(self._seconds)  # the candidate takes most of the second window
            promising = all(self._cost(largest) < CLEARLY * self._cost(size) for size in smaller)
            if self._candidate in self._seconds or not promising:
                self._measure_again()
        if self._windows >= WINDOWS:
            self._settle()

    def _measure_again(self) -> None:
        self._candidate, best = None, self._cost(self._best())
        near = [size for size in self._seconds if self._cost(size) <= WORTH_REPEATING * best]
        self._again = sorted(near, key=self._cost)[:REPEATED]
        if len(self._again) == 1:
            self._settle()

    def _settle(self) -> None:
        self.size, self.settled, self._candidate = self._best(), True, None

    def _best(self) -> int:
        return min(self._seconds, key=self._cost)

    def _cost(self, size: int) -> float:
        """Seconds per row: the mean of the repeated measurements.

        Of a size that was measured once, the median of its own and its neighbours': time per row is smooth in the
        size, so an outlier is another program's work, or luck.
        """
        if repeated := self._seconds[size][1:]:
            return sum(repeated) / len(repeated) / size
        sizes = sorted(self._seconds)
        place = sizes.index(size)
        near = [self._seconds[known][0] / known for known in sizes[max(place - 1, 0) : place + 2]]
        return statistics.median(near) if len(near) == 3 else near[-1] if place else max(near)


def fastest_size(
    rows: int, trial: Callable[[int], tuple[float, float | None]], limit: float
) -> tuple[int, dict[int, float], dict[int, float]]:
    """The fastest size whose memory is within the limit; and by size, the bytes and the seconds that show it.

    `trial(size)` returns the bytes that a size takes, and the seconds of the whole batch; None where it doesn't fit.

    Raises:
        DoesNotFit: Not even one row does.

    Example:
        >>> trial = lambda size: (100.0 * size, 1.0 + 64.0 / size if size <= 100 else None)
        >>> size, tried, _ = fastest_size(256, trial, limit=10_000)
        >>> size, sorted(tried)
        (100, [4, 16, 64, 100])
    """
    tried: dict[int, float] = {}
    seconds: dict[int, float] = {}
    line = MemoryLine()

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size], taken = trial(size)
            line.add(size, tried[size])
            if taken is not None:
                seconds[size] = taken
        return size in seconds

    size = max(rows // SMALLEST_PART, 1)
    while not fits(size):
        if size == 1:
            raise DoesNotFit(
                f'micro_batch_size="auto": micro-batches of one row take {format_bytes(tried[1])} with the parameters, '
                f"the batch and the gradients, as XLA states it; the limit is {format_bytes(limit)}. Raise "
                "`memory_limit`."
            )
        size = max(size // STEP, 1)
    while size < rows:
        following = min(STEP * size, rows)
        if line.predict(following) > limit:
            following = min(following, line.largest(limit) or 1)
        if following <= size or not fits(following):
            break
        size = following
        if seconds[size] > WORSE * min(seconds.values()):
            break
    best = min(seconds, key=seconds.__getitem__)
    for near in (best // 2, 2 * best):
        between = min(tried) < near < max(seconds)
        new = all(max(near, size) > 1.5 * min(near, size) for size in tried)
        if between and new and line.predict(near) <= limit:
            fits(near)
    return min(seconds, key=seconds.__getitem__), tried, seconds


def seconds_of(run: Callable[[], Any]) -> float:
    """How long this takes: the least time of those behind the first one, which is slow."""
    taken: list[float] = []
    while len(taken) < (4 if taken[1:] and taken[1] < QUICK else 2):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
