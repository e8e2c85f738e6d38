"""The size of a micro-batch: even sizes, one that the user chose, or the fastest that fits.

Any split gives the same update, so searching costs no exactness: every measurement is a real micro-batch. Sizes double
from one row on; the fastest are measured again; the search ends within two windows. What a size needs is predicted
before it is tried: above a knee, the peak memory is affine in the size.

Where updates are compiled as a whole, a few sizes are compiled and timed beforehand: `fastest_size`.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaccum.schedule import checked_count

logger = logging.getLogger("gradaccum")

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
STEP = 4
"""Sizes that are compiled are tried in steps of this factor, and the double and the half of the best one after that."""
SMALLEST_PART = 64
"""The first of them is this part of the rows."""
WORSE = 1.05
"""A size that takes so much longer than the best one is slower, not noise."""
QUICK = 0.2
"""Seconds below which a program is timed three times."""


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
    """The first of `even_sizes`; applied to the rows that are left, again and again, it gives all of them."""
    return -(-rows // -(-rows // micro_batch_size))


class FixedSize:
    """A micro-batch size that the user chose, halved when it runs out of memory. The interface of `SizeSearch`."""

    settled = True

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


Sizer = SizeSearch | FixedSize


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


class BatchSizeFinder:
    """The micro-batch sizes of a training step.

    Shapes are distinguished by the kinds of their tensors, and by the elements of a row rounded to a power of two:
    text that every batch pads to another length must not start a search in every batch. Rows longer than those a size
    was found with get proportionally smaller micro-batches.
    """

    def __init__(self, micro_batch_size: int | str, limit: Callable[[], float | None], minimum: int = 1) -> None:
        if isinstance(micro_batch_size, str) and micro_batch_size != "auto":
            raise ValueError(f'`micro_batch_size` must be an int >= 1 or "auto". Received: {micro_batch_size!r}.')
        self.given = None if micro_batch_size == "auto" else checked_count(micro_batch_size, "micro_batch_size")
        """The size that was asked for; None where it is searched for."""
        self._limit, self.minimum = limit, minimum
        self._known: dict[str, tuple[Sizer, float]] = {}
        self._last: Sizer | None = None
        self._seen: list[Any] = []
        self._logged: dict[int, int] = {}

    @property
    def size(self) -> int | None:
        return self.given if self._last is None else self._last.size

    def of(self, tensors: list[tuple[str, Any, int]], predict: Callable[[], int] | None = None) -> Sizer:
        """The size for a batch with these tensors."""
        seen = [(path, t.shape, t.dtype, dim) for path, t, dim in tensors]
        if seen == self._seen and self._last is not None:
            return self._last
        self._seen = seen
        elements = float(sum(math.prod(t.shape) / max(t.shape[dim], 1) for _, t, dim in tensors))
        kinds = ", ".join(f"{path} {t.dtype} {t.ndim}" for path, t, dim in tensors)
        key = f"{kinds}; 2**{math.floor(math.log2(max(elements, 1.0)))}"
        if key not in self._known:
            self._known[key] = self._new(elements, predict), elements
        sizer, measured = self._known[key]
        if elements > measured:
            if predict is not None:
                sizer.size = min(sizer.size, predict())
            elif isinstance(sizer, SizeSearch) and sizer.settled:
                sizer.size = max(int(sizer.size * measured / elements), 1)
            self._known[key] = sizer, elements
        self._last = sizer
        return sizer

    def close(self, sizer: Sizer, rows: int) -> None:
        before = self._logged.get(id(sizer))
        sizer.close()
        if isinstance(sizer, SizeSearch) and sizer.settled and before != sizer.size:
            self._logged[id(sizer)] = sizer.size
            logger.info("micro_batch_size='auto': %d of %d rows. %s", sizer.size, rows, sizer.summary)

    def _new(self, elements: float, predict: Callable[[], int] | None) -> Sizer:
        if self.given is not None:
            return FixedSize(self.given)
        if predict is not None:
            return FixedSize(max(predict(), self.minimum))
        start = 1
        settled = [(sizer.size, measured) for sizer, measured in self._known.values() if sizer.settled]
        if settled:  # begin a little below what the nearest shape suggests
            size, measured = min(settled, key=lambda known: abs(math.log(known[1] / elements)))
            start = 1 << max(int(math.log2(max(size * min(measured / elements, 1.0) / 4, 1.0))), 0)
        return SizeSearch(start, self._limit(), self.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {
            key: {"size": sizer.size, "elements": elements, "settled": sizer.settled}
            for key, (sizer, elements) in self._known.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sizes of `state_dict`; a smaller size that the user has chosen since is kept."""
        for key, found in state.items():
            sizer: Sizer
            if self.given is not None:
                sizer = FixedSize(min(found["size"], self.given))
                sizer.ceiling = sizer.size if sizer.size < self.given else None  # it ran out of memory
            elif found["settled"]:
                sizer = SizeSearch(found["size"], self._limit(), self.minimum)
                sizer.settled = True
            else:
                continue
            self._known[key] = sizer, found["elements"]
            self._last, self._seen = sizer, []


# What memory the host or the container has free, from Linux's files, and the largest micro-batch that fits it.

NO_LIMIT = 1 << 60
"""cgroup v1 says 'no limit' with a number near 2**63."""
_UNITS = {f"{k}{i}": (1024 if i else 1000) ** power for power, k in enumerate(["", *"kmgt"]) for i in ("", "i"[:power])}


def process_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """`VmRSS` and `VmHWM` of this process in bytes: now and at its peak; 0 where unknown."""
    lines = _lines(status)
    return {name: _kilobytes(lines, name) or 0 for name in ("VmRSS", "VmHWM")}


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still allocate: the smaller of what the machine and its container's limit leave."""
    available = _kilobytes(_lines(root / "proc/meminfo"), "MemAvailable")
    free = [limit - used for limit, used in container_limits(root)] + ([] if available is None else [available])
    return max(min(free), 0) if free else None


def container_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """`(limit, in use)` in bytes of every cgroup, version 1 or 2, that limits this process' memory."""
    groups = root / "sys/fs/cgroup"
    kinds = [
        (groups, "", "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    entries = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    paths = {controller: path for _, controllers, path in entries for controller in controllers.split(",")}
    found = []
    for top, controller, limit_name, usage_name, cache_name in kinds:
        # A container sees its own group at the top, or at the host's path for it; its parents' limits hold too.
        relative = Path(paths.get(controller, "/").lstrip("/"))
        for folder in {top, *(top / part for part in (relative, *relative.parents))}:
            limit, used = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and used is not None and limit < NO_LIMIT:
                found.append((limit, used - _cache(folder / "memory.stat", cache_name)))
    return sorted(found)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _cache(path: Path, name: str) -> int:
    return int(dict(line.split() for line in _lines(path)).get(name, 0))


def _kilobytes(lines: list[str], name: str) -> int | None:
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def parse_bytes(size: Any) -> int | None:
    """`memory_limit` in bytes; None stays None."""
    if size is None:
        return None
    must = '`memory_limit` must be a positive number of bytes or a string such as "4GiB".'
    received = f"Received: memory_limit={size!r}."
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", size.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{must} {received}")
        size = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"{must} {received}")
    if size < 1:
        raise ValueError(f"{must} {received}")
    return int(size)


class DoesNotFit(ValueError):
    """Not even one row fits."""


@dataclass(frozen=True)
class SizeEstimate:
    """What a micro-batch of a batch needs, and the largest that fits.

    Example:
        >>> print(SizeEstimate(64, 256, 16 * 2**30, 14 * 2**30, 2 * 2**30, 0.1))
        micro_batch_size: 64 of 256 rows
        estimated peak:   14.0 GiB, 2.0 GiB of it for parameters, gradients, optimizer state and the batch
        memory limit:     16.0 GiB, 10 % of it left free as a margin
    """

    micro_batch_size: int
    rows: int
    limit: int
    peak: int
    constant: int
    margin: float

    def __str__(self) -> str:
        return (
            f"micro_batch_size: {self.micro_batch_size} of {self.rows} rows\n"
            f"estimated peak:   {format_bytes(self.peak)}, {format_bytes(self.constant)} of it for parameters, "
            "gradients, optimizer state and the batch\n"
            f"memory limit:     {format_bytes(self.limit)}, {100 * self.margin:.0f} % of it left free as a margin"
        )


def largest_size(peak: Callable[[int], int], rows: int, allowed: float) -> tuple[int, int]:
    """The largest size whose peak is allowed, and that peak; where none is, one row and its peak.

    The peak is the larger of a few affine functions of the size, so it is convex: the line between two known sizes is
    above it. Reading the size off that line is safe, and once more, from there, nearly exact.
    """
    known = {rows: peak(rows)}
    if known[rows] <= allowed:
        return rows, known[rows]
    known[1] = peak(1)
    fits = 1
    for _ in range(3):
        if known[fits] > allowed:
            break
        above = min(size for size in known if known[size] > allowed)
        part = (allowed - known[fits]) / (known[above] - known[fits])
        size = min(math.floor(fits + part * (above - fits)), above - 1)
        if size <= fits:
            break
        known[size] = peak(size)
        if known[size] <= allowed:
            fits = size
    return fits, known[fits]


def format_bytes(number: float) -> str:
    """A `number` of bytes with a binary unit.

    Example:
        >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(-12)
        ('1.5 KiB', '3.0 GiB', '-12 B')
    """
    if abs(number) < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if abs(number) < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"
