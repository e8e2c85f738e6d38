"""What the benchmarks have measured, as a picture: one SVG with a line for each contender's time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import harness
from benchmarks.harness import Ratio
from scripts.pictures import line, svg, text

WIDTH, LEFT, RIGHT, ROW = 760, 320, 30, 17
LEAST, MOST = 0.125, 8.0
"""Ratios beyond these stand at the edge."""


def write_picture() -> None:
    """Draw docs/images/benchmarks.svg from docs/benchmarks.json, and show it on the page."""
    image = harness.PAGE.parent / "images" / "benchmarks.svg"
    image.parent.mkdir(exist_ok=True)
    image.write_text(drawn(json.loads(harness.RECORDS.read_text(encoding="utf-8"))), encoding="utf-8")
    words = "The table's times: a line for each contender, the rival of each comparison at 1."
    harness.keep(harness.PAGE, "picture", f"![{words}](images/benchmarks.svg)\n")


def drawn(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Each script's first comparison: the rival at 1, ours in blue, others in orange, a bar for the quartiles."""

    def across(ratio: float) -> float:
        part = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    y, shapes, told = 62.0, [], []
    for title, contenders, ours, rival in _comparisons(records):
        y += 26
        shapes.append(text(20, y - 8, title, "small"))
        told.append(f"{title}: {'; '.join(f'{name} {float(ratio):.2f}' for name, ratio in contenders.items())}")
        for name, ratio in contenders.items():
            shown = name.replace("`", "")
            colour = "quiet" if name == rival else "a" if name in ours else "b"
            x, middle = across(ratio), y + 4
            shapes += [
                text(LEFT - 90, y + 8, shown if len(shown) <= 34 else f"{shown[:33]}…", "small end"),
                line([(across(ratio.low), middle), (across(ratio.high), middle)], colour, 2),
                f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4.5" style="fill:var(--{colour})"/>',
                text(LEFT - 10, y + 8, str(ratio), "small end"),
            ]
            y += ROW
    shapes = [
        text(20, 28, "Time, as a ratio to the rival of each comparison", "title"),
        text(
            20,
            48,
            "Blue: gradaccum. Orange: others. Grey: the rival, at 1. Bars: the middle half of the rounds.",
            "small",
        ),
        *(
            shape
            for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8)
            for shape in (
                line([(across(tick), 74), (across(tick), y)], "rule", 2 if tick == 1 else 1),
                text(across(tick), 68, f"{tick:g}", "small mid"),
            )
        ),
        *shapes,
    ]
    return svg(WIDTH, math.ceil(y) + 16, "Times as ratios to a rival. " + ". ".join(told), shapes)


def _comparisons(records: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Ratio], list[str], str]]:
    for record in records.values():
        for measured in record["measured"][:1]:
            contenders = {name: Ratio(*measured["ratios"][name]) for name in sorted(measured["ratios"], key=_by_number)}
            title = record["title"] + (f": {measured['about']}" if measured["about"] else "")
            yield title.replace("`", ""), contenders, record["ours"], measured["rival"]


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    """The key that sorts names as people count: 16 before 128."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name) if part]
