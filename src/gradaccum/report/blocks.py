"""The blocks that a report is made of: paragraphs, tables, figures. They know their content, not how it is drawn."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Text:
    """A paragraph of prose.

    Args:
        text: Its words; wrapped where it is shown.
    """

    text: str


@dataclass(frozen=True)
class Code:
    """Preformatted lines: a message, a command, a listing.

    Args:
        text: The lines.
    """

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names.

    Args:
        columns: Their names.
        rows: As many cells each as there are columns: str, numbers (four significant digits are shown) or None ("-").
        caption: What the table shows, in a line.

    Raises:
        ValueError: A row has another number of cells.

    Example:
        >>> print(Table(["micro-batch", "seconds"], [[16, 1.25], [64, 0.84211]]).plain())
        micro-batch  seconds
        -----------  -------
                 16     1.25
                 64   0.8421
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"A row must have a cell for each column. Received: {list(row)!r} for {list(self.columns)!r}."
                )

    @property
    def cells(self) -> list[list[str]]:
        """The rows as they are shown."""
        return [[format_value(cell) for cell in row] for row in self.rows]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds quantities, which are aligned right."""
        return [
            any(cell is not None for cell in column) and all(_is_quantity(cell) for cell in column)
            for column in (list(zip(*self.rows, strict=True)) or [()] * len(self.columns))
        ]

    def plain(self) -> str:
        """The table in plain text."""
        lines = [list(self.columns), *self.cells]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        lines.insert(1, ["-" * width for width in widths])
        aligned = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, self.numeric, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join(([self.caption] if self.caption else []) + aligned)


@dataclass(frozen=True)
class Curve:
    """One line of a `Curves` figure.

    Args:
        name: Its entry in the legend.
        x, y: Its points.
        points: Whether the points are drawn singly, without a line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


@dataclass(frozen=True)
class Curves:
    """A figure of curves over one axis. Curves that coincide stay visible: a broad one below, dashed ones above.

    Args:
        title: What it shows.
        curves: In the order of the legend.
        x_label, y_label: The axes, with their units.
        log: Whether the y axis (and with `log_x` the x axis) is logarithmic.
        limits: `{name: y}`, each drawn as a horizontal line: a tolerance, a memory limit.
    """

    title: str
    curves: Sequence[Curve]
    x_label: str = ""
    y_label: str = ""
    log: bool = False
    log_x: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> str:
        """Each curve's first and last value."""
        rows = [[c.name, len(c.x), c.y[0], c.y[-1]] for c in self.curves if len(c.y)]
        return Table(["curve", "points", "first", "last"], rows, caption=self.title).plain()


@dataclass(frozen=True)
class Bars:
    """A figure of horizontal bars, one for each entry of `values`, with its number beside it.

    Args:
        title: What it shows.
        values: `{name: value}`, from the top to the bottom.
        unit: Of the values; shown on the axis and beside each number.
        log: Whether the axis is logarithmic; zeros are then drawn as empty bars.
        limits: `{name: value}`, each drawn as a vertical line.
    """

    title: str
    values: Mapping[str, float]
    unit: str = ""
    log: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> str:
        """The names and values as a table."""
        rows = [[name, f"{format_value(value)} {self.unit}".rstrip()] for name, value in self.values.items()]
        return Table(["", self.unit or "value"], rows, caption=self.title).plain()


Block = Text | Code | Table | Curves | Bars
"""What a report is made of."""


def format_value(value: Any) -> str:
    """The text of a table's cell with this `value`.

    Example:
        >>> [format_value(value) for value in (60000, 0.123456, 3.2e-16, None, "rows", True, float("nan"))]
        ['60,000', '0.1235', '3.2e-16', '-', 'rows', 'yes', 'nan']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        value = float(value)
        return f"{value:,.0f}" if math.isfinite(value) and 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def _is_quantity(cell: Any) -> bool:
    if cell is None or (isinstance(cell, numbers.Real) and not isinstance(cell, bool)):
        return True
    return isinstance(cell, str) and cell[:1] != "" and cell.lstrip("+-<≤≥~ ")[:1].isdigit()
