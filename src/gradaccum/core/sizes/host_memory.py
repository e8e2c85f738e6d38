"""How much memory the host, or the container that this process runs in, has free, from Linux's files; byte counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["container_limits", "free_host_memory", "parse_bytes", "process_memory"]

NO_LIMIT = 1 << 60
"""cgroup v1 says 'no limit' with a number near 2**63."""
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4} | {
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def process_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """`VmRSS` and `VmHWM` of this process in bytes: now and at its peak; 0 where unknown."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still allocate: the smaller of what the machine and its container's limit leave."""
    free = [_available(root), *(limit - used for limit, used in container_limits(root))]
    known = [max(number, 0) for number in free if number is not None]
    return min(known, default=None)


def container_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """`(limit, in use)` in bytes of every cgroup, version 1 or 2, that limits this process' memory."""
    groups = root / "sys/fs/cgroup"
    kinds = [
        (groups, "", "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {controller: path for line in lines for _, controllers, path in [line.split(":", 2)]
             for controller in controllers.split(",")}  # fmt: skip
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
    """Bytes of cached files: they count as used, but are freed on demand."""
    try:
        pairs = dict(line.split() for line in path.read_text().splitlines())
        return int(pairs.get(name, 0))
    except (OSError, ValueError):
        return 0


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def parse_bytes(size: Any) -> int | None:
    """`memory_limit` in bytes; None stays None.

    Example:
        >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes(1024)
        (4294967296, 1500000, 1024)
    """
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
