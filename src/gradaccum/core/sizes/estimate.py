"""What a micro-batch needs, and the largest that fits: an estimate without the device that has the memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradaccum.core.sizes.search import MemoryLine

__all__ = ["DoesNotFit", "SizeEstimate", "format_bytes", "largest_size"]


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
        line = MemoryLine()
        above = min(size for size in known if known[size] > allowed)
        line.add(fits, known[fits])
        line.add(above, known[above])
        size = min(math.floor(fits + (allowed - known[fits]) / max(line.slope, 1e-9)), above - 1)
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
