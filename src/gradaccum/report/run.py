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
from gradaccum.core.sizes import format_bytes
from gradaccum.report.blocks import Block, Curve, Curves, Table, Text, format_value
from gradaccum.report.report import Report

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

_NOISE = "value", "low", "high", "batch_size", "updates"


@dataclass(frozen=True)
class Run:
    """A recorded run."""

    name: str
    starts: tuple[dict[str, Any], ...]
    """One entry for each time the run was started or resumed: versions, device, time."""
    updates: tuple[dict[str, Any], ...]
    """One mapping of numbers per update, in the order of the file."""
    damaged: int = 0
    """Lines that could not be read."""

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """`(updates, values)` of one quantity, where it was recorded."""
        pairs = [(float(line["update"]), float(line[name])) for line in self.updates if _is_number(line.get(name))]
        return [x for x, _ in pairs], [y for _, y in pairs]

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The last measured noise scale."""
        for line in reversed(self.updates):
            noise = line.get("noise")
            if isinstance(noise, Mapping) and all(_is_number(noise.get(name)) for name in _NOISE):
                value, low, high, batch_size, updates = (float(noise[name]) for name in _NOISE)
                unit = str(noise.get("unit", "rows"))
                return NoiseScale(value, (low, high), batch_size, int(updates), math.nan, math.nan, unit)
        return None

    def report(self) -> Report:
        """The run as a document: a table of what changed, the noise scale's advice, a figure for each quantity."""
        if not self.updates:
            return Report(self.name, self._remarks(), summary="No update was recorded.")
        recorded = {name for line in self.updates for name in line} - {"update", "noise"}
        rows, figures, constant = list[list[str]](), list[Curves](), list[str]()
        for name in [name for name in _FIGURES if name in recorded] + sorted(recorded - _FIGURES.keys()):
            x, y = self.column(name)
            title, unit = _FIGURES.get(name, (name, ""))
            if name == "peak_memory":
                y = [value / 2**20 for value in y]
            if len(y) > 1 and min(y) == max(y):
                constant.append(f"{title} {format_value(y[0])} {unit}".rstrip())
            elif y:
                values = map(format_value, (y[0], statistics.median(y), y[-1], min(y), max(y)))
                rows.append([f"{title}, {unit}" if unit else title, *values])
                figures.append(Curves(title, [Curve(title, x, y, points=len(y) < 3)], "update", unit))
        blocks: list[Block] = [Table(["", "first", "median", "last", "least", "largest"], rows)] if rows else []
        if constant:
            blocks.append(Text(f"The same in each update: {', '.join(constant)}."))
        if (noise := self.noise_scale) is not None:
            blocks.append(Text(noise.advice()))
        return Report(self.name, [*blocks, *self._remarks(), *figures], summary=self._summary())

    def _summary(self) -> str:
        parts = [_counted(len(self.updates), "update")]
        if seconds := sum(self.column("seconds")[1]):
            parts.append(f"{format_value(round(seconds, 3))} seconds")
        if memory := self.column("peak_memory")[1]:
            parts.append(f"at most {format_bytes(max(memory))} of memory")
        return ", ".join(parts) + "."

    def _remarks(self) -> list[Block]:
        remarks = []
        if len(self.starts) > 1:
            remarks.append(f"The run was started {len(self.starts)} times.")
        if self.damaged:
            remarks.append(f"{_counted(self.damaged, 'line')} of the file could not be read.")
        if self.starts and self.starts[-1]:
            remarks.append("Recorded with " + ", ".join(f"{k} {v}" for k, v in self.starts[-1].items()) + ".")
        return [Text(remark) for remark in remarks]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def read(path: str | os.PathLike[str]) -> Run:
    """Read a file of JSON lines, however it ends; OSError where it can't be read."""
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
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, or nested a thousand times
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
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() < 1024  # larger ones don't fit into a float
    return isinstance(value, float) or value in ("nan", "inf", "-inf")
