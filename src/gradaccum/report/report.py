"""What a check or a run found: one document, rendered as text, as a PNG and as a self-contained HTML page.

```
report = Report("Two runs", [Text("They agree."), Table(["run", "loss"], [["a", 0.31], ["b", 0.31]])], ok=True)
print(report)                 # plain text, no dependency
report.show()                 # the same in colour, where it goes to a terminal
report.save("report.html")    # one file, offline, light and dark; or .png (its pictures), .txt
```

Its blocks know their content, not how it is drawn. `show`, PNG and HTML need rich, matplotlib and jinja2, the extra
`gradaccum[cli]`; they are imported when used.
"""

from __future__ import annotations

import importlib.resources
import math
import numbers
import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from gradaccum.extras import require
from gradaccum.report.files import write

__all__ = ["Bars", "Block", "Code", "Curve", "Curves", "Report", "Table", "Text", "format_value"]

_WIDTH = 120


@dataclass(frozen=True)
class Text:
    """A paragraph of prose.

    Args:
        text: Its words; wrapped where it is shown.
    """

    text: str


@dataclass(frozen=True)
class Code:
    """Lines that are shown as they stand: a message, a command, a listing.

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
        """For each column whether it holds quantities, which are aligned right."""
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
        """Each curve's first and last value, the most that a line of text can say of a picture."""
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
    """The text that a cell of this `value` shows.

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


@dataclass(frozen=True)
class Report:
    """A document of paragraphs, tables and figures.

    Args:
        title: Its headline.
        blocks: `Text`, `Code`, `Table`, `Curves` and `Bars`, in reading order. Text output leaves the figures out: give
            their numbers in a table where they matter.
        ok: The verdict that colours the `summary`: True, False, or None where there is nothing to judge.
        summary: The verdict in a line or two.

    Example:
        >>> report = Report("Equal?", [Text("64 rows against 4 x 16.")], ok=True, summary="Equal to 3e-16.")
        >>> print(report)
        Equal?
        ======
        Equal to 3e-16.
        <BLANKLINE>
        64 rows against 4 x 16.
    """

    title: str
    blocks: Sequence[Block] = ()
    ok: bool | None = None
    summary: str = ""

    @property
    def figures(self) -> list[Curves | Bars]:
        """The blocks that are pictures."""
        return [block for block in self.blocks if isinstance(block, (Curves, Bars))]

    def __str__(self) -> str:
        parts = [f"{self.title}\n{'=' * len(self.title)}" + (f"\n{self.summary}" if self.summary else "")]
        for block in self.blocks:
            if isinstance(block, Text):
                parts.append(textwrap.fill(block.text, _WIDTH, break_long_words=False, break_on_hyphens=False))
            elif isinstance(block, Code):
                parts.append(textwrap.indent(block.text, "    "))
            elif isinstance(block, Table):
                parts.append(block.plain())
        return "\n\n".join(parts)

    def show(self, file: IO[str] | None = None) -> None:
        """Print it: with colour and rules where `file` (standard output) is a terminal, else as plain text.

        Raises:
            ModuleNotFoundError: rich is not installed.
        """
        console = require("rich.console").Console(file=file, highlight=False)
        if not console.is_terminal:
            print(self, file=console.file)
            return
        rich_table, box, markup = require("rich.table"), require("rich.box"), require("rich.text")
        console.print(markup.Text(self.title, style="bold"))
        if self.summary:
            console.print(markup.Text(self.summary, style={True: "green", False: "red", None: ""}[self.ok]))
        for block in self.blocks:
            if isinstance(block, (Curves, Bars)):
                continue
            console.print()
            if isinstance(block, Table):
                narrow = {"pad_edge": False, "collapse_padding": True, "box": box.SIMPLE_HEAD}
                shown = rich_table.Table(title=block.caption or None, title_justify="left", **narrow)
                for name, right in zip(block.columns, block.numeric, strict=True):
                    # Folded, not cut: no digit is ever lost.
                    shown.add_column(markup.Text(name), justify="right" if right else "left", overflow="fold")
                for cells in block.cells:
                    shown.add_row(*map(markup.Text, cells))
                console.print(shown)
            elif isinstance(block, Code):
                console.print(markup.Text(textwrap.indent(block.text, "    "), style="cyan"), soft_wrap=True)
            else:
                console.print(markup.Text(block.text))

    def html(self) -> str:
        """One HTML page that needs nothing else: its style and its pictures are in it, for light and dark screens.

        Raises:
            ModuleNotFoundError: jinja2 is not installed, or matplotlib where there are figures.
        """
        template = (
            importlib.resources.files("gradaccum.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
        )
        if self.figures:
            require("matplotlib")
            from gradaccum.report.pictures import data_uri
        else:
            data_uri = None  # type: ignore[assignment]  # never called
        environment = require("jinja2").Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        kinds = [type(block).__name__.lower() for block in self.blocks]
        page = environment.from_string(template)
        return page.render(report=self, blocks=list(zip(kinds, self.blocks, strict=True)), picture=data_uri)

    def png(self) -> bytes:
        """Its figures side by side under its title.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: It has no figures.
        """
        if not self.figures:
            raise ValueError(f'The report "{self.title}" has no figures to draw. Save it as .html or .txt.')
        require("matplotlib")
        from gradaccum.report.pictures import picture

        return picture(self.figures, title=self.title)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write it to a file; its ending decides: `.html`, `.png` (the figures alone) or `.txt`. Makes its folder.

        Raises:
            ModuleNotFoundError: What draws it is not installed.
            OSError: It cannot be written; a file that was there is left as it was.
            ValueError: Another ending.
        """
        path = pathlib.Path(path)
        ending = path.suffix.lower()
        if ending not in (".html", ".png", ".txt"):
            raise ValueError(f"A report is saved as .html, .png or .txt. Received: {str(path)!r}.")
        if ending == ".png":
            content = self.png()
        else:
            content = (self.html() if ending == ".html" else f"{self}\n").encode("utf-8")
        return write(path, content)
