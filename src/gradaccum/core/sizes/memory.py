"""What memory the host or the container has free, from Linux's files, and the largest micro-batch that fits it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARGIN = 0.1
"""Part of a memory limit that predicted peaks leave free: allocators round up and leave fragments, kernels have
workspaces, a CUDA context takes some."""
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
