"""The record of a training run: JSON lines, one per update, and the report they become.

A file may end anywhere, as those of interrupted runs do: readable lines are used, the others counted.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradaccum.core.noise import NoiseScale
from gradaccum.report.blocks import Block, Curve, Curves, Table, Text, format_bytes, format_value
from gradaccum.report.report import Report

__all__ = ["Run", "encode", "read"]

_FIGURES = {
    "loss": ("Loss", ""),
    "grad_norm": ("Gradient norm, before clipping", ""),
    "seconds": ("Time per update", "seconds"),
    "micro_batch_size": ("Micro-batch size", "rows"),
    "steps": ("Micro-batches per update", ""),
    "peak_memory": ("Peak memory", "MiB"),
    "noise_scale": ("Noise scale", "rows"),
}
"""What is drawn, in this order; anything else that was recorded follows under its own name."""

_NOT_DRAWN = ("update", "noise")


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Args:
        name: Its name in the report.
        starts: One entry for each time the run was started or resumed: versions, device, time.
        updates: One mapping of numbers per update, in the order of the file.
        damaged: Lines that could not be read.
    """

    name: str
    starts: tuple[dict[str, Any], ...]
    updates: tuple[dict[str, Any], ...]
    damaged: int = 0

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """`(updates, values)` of one quantity, where it was recorded."""
        pairs = [(float(line["update"]), float(line[name])) for line in self.updates if _is_number(line.get(name))]
        return [x for x, _ in pairs], [y for _, y in pairs]

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The last measured noise scale."""
        for line in reversed(self.updates):
            noise = line.get("noise")
            if isinstance(noise, Mapping):
                numbers = {name: float(value) for name, value in noise.items() if _is_number(value)}
                if {"value", "low", "high", "batch_size", "updates"} <= numbers.keys():
                    return NoiseScale(
                        numbers["value"],
                        (numbers["low"], numbers["high"]),
                        numbers["batch_size"],
                        int(numbers["updates"]),
                        math.nan,
                        math.nan,
                        str(noise.get("unit", "rows")),
                    )
        return None

    def report(self) -> Report:
        """The run as a document: a table of what changed, the noise scale's advice, a figure for each quantity."""
        if not self.updates:
            return Report(self.name, self._remarks(), summary="No update was recorded.")
        names = [name for name in _FIGURES if any(name in line for line in self.updates)]
        more = {name for line in self.updates for name in line} - set(names) - set(_NOT_DRAWN)
        rows, figures, constant = [], [], []
        for name in [*names, *sorted(more)]:
            x, y = self.column(name)
            if not y:
                continue
            title, unit = _FIGURES.get(name, (name, ""))
            if name == "peak_memory":
                y = [value / 2**20 for value in y]
            shown = [format_value(value) for value in (y[0], statistics.median(y), y[-1], min(y), max(y))]
            if len(y) > 1 and min(y) == max(y):
                constant.append(f"{title} {shown[0]} {unit}".rstrip())
                continue
            rows.append([f"{title}, {unit}" if unit else title, *shown])
            figures.append(Curves(title, [Curve(title, x, y, points=len(y) < 3)], "update", unit))
        blocks: list[Block] = [Table(["", "first", "median", "last", "least", "largest"], rows)] if rows else []
        if constant:
            blocks.append(Text(f"The same in each update: {', '.join(constant)}."))
        noise = self.noise_scale
        if noise is not None:
            blocks.append(Text(noise.advice()))
        return Report(self.name, [*blocks, *self._remarks(), *figures], summary=self._summary())

    def _summary(self) -> str:
        updates = len(self.updates)
        parts = [f"{updates} update{'s' if updates != 1 else ''}"]
        seconds = sum(self.column("seconds")[1])
        if seconds:
            parts.append(f"{format_value(round(seconds, 3))} seconds")
        memory = self.column("peak_memory")[1]
        if memory:
            parts.append(f"at most {format_bytes(max(memory))} of memory")
        return ", ".join(parts) + "."

    def _remarks(self) -> list[Block]:
        remarks = []
        if len(self.starts) > 1:
            remarks.append(f"The run was started {len(self.starts)} times.")
        if self.damaged:
            remarks.append(f"{self.damaged} line{'s' if self.damaged != 1 else ''} of the file could not be read.")
        start = self.starts[-1] if self.starts else {}
        if start:
            remarks.append("Recorded with " + ", ".join(f"{name} {value}" for name, value in start.items()) + ".")
        return [Text(remark) for remark in remarks]


def read(path: str | os.PathLike[str]) -> Run:
    """Read a file of JSON lines, however it ends.

    Raises:
        OSError: The file can't be read.
    """
    path = pathlib.Path(path)
    return parse(path.name, path.read_text(encoding="utf-8", errors="replace").splitlines())


def parse(name: str, lines: Iterable[str]) -> Run:
    """Read these lines.

    Example:
        >>> run = parse("a run", ['{"start": {"torch": "2.13"}}', '{"update": 1, "loss": 2.5}', '{"update": 2, "lo'])
        >>> run.column("loss"), run.damaged
        (([1.0], [2.5]), 1)
    """
    starts, updates, damaged = [], [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("start"), dict):
            starts.append(record["start"])
        elif isinstance(record, dict) and _is_number(record.get("update")):
            updates.append(record)
        else:
            damaged += 1
    return Run(name, tuple(starts), tuple(updates), damaged)


def encode(record: Mapping[str, Any]) -> str:
    """One line of valid JSON; numbers that JSON doesn't have are the strings "nan", "inf" and "-inf".

    Example:
        >>> encode({"update": 1, "loss": float("nan")})
        '{"update": 1, "loss": "nan"}'
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(inner) for name, inner in value.items()}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(record))


def _is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in ("nan", "inf", "-inf")
