"""What a check or a run found: one document, rendered as text, as a PNG and as a self-contained HTML page.

```
report = Report("Two runs", [Text("They agree."), Table(["run", "loss"], [["a", 0.31], ["b", 0.31]])], ok=True)
print(report)                 # plain text, no dependency
report.show()                 # the same in colour, where it goes to a terminal
report.save("report.html")    # one file, offline, light and dark; or .png (its pictures), .txt
```

`show`, PNG and HTML need rich, matplotlib and jinja2, the extra `gradaccum[cli]`; they are imported when used.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.resources
import itertools
import os
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from gradaccum.extras import require
from gradaccum.report.blocks import Bars, Block, Code, Curves, Table, Text

_WIDTH = 120


@dataclass(frozen=True)
class Report:
    """A document of paragraphs, tables and figures.

    Args:
        title: Its headline.
        blocks: `Text`, `Code`, `Table`, `Curves` and `Bars`, in reading order. Text output leaves the figures out, so
            give important numbers in a table, too.
        ok: The verdict that colours the `summary`: True, False, or None if there is nothing to judge.
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
        """Print it, with colour and rules if `file` (standard output) is a terminal, else as plain text.

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
        """One HTML page that contains its style and pictures, for light and dark screens.

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
        """Write it to a file ending in `.html`, `.png` (the figures alone) or `.txt`. Makes its folder.

        Raises:
            ModuleNotFoundError: A library that draws it is not installed.
            OSError: It cannot be written; an existing file stays as it was.
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


# Files that are written whole or not at all.

ROOM = 1 << 20
"""Bytes that `check_writable` tries: more than a report takes."""


def write(path: str | os.PathLike[str], content: bytes) -> pathlib.Path:
    """Write `content` to the file at `path`, and make its folder. Returns the path.

    The new file replaces an old one when it is complete, so a full disk leaves the old one as it was.

    Raises:
        OSError: It cannot be written; names the file.
    """
    with _target(path) as target:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            target.write_bytes(content)
        else:
            with _unfinished(target) as unfinished:
                unfinished.write_bytes(content)
                unfinished.replace(target)
    return pathlib.Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Test whether `write` can write to this `path`. Leaves nothing behind.

    Raises:
        OSError: The folder is read-only or can't be made, the disk is full, `path` is a folder itself, ...; names the
            file.
    """
    with _target(path) as target, contextlib.ExitStack() as undo:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():  # a device or a pipe: whoever reads it would read this
            return
        missing = itertools.takewhile(lambda folder: not folder.exists(), target.parents)
        for folder in reversed(list(missing)):
            undo.callback(_remove_empty, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _unfinished(target) as unfinished:
            unfinished.write_bytes(bytes(ROOM))


@contextlib.contextmanager
def _target(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """What a link leads to; a link to itself is an error when it is used. Errors inside name the path."""
    try:
        yield pathlib.Path(os.path.realpath(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(pathlib.Path(path))) from None


@contextlib.contextmanager
def _unfinished(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file beside the `target`, which is gone at the end, also where that is an error or Ctrl-C."""
    file = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _remove_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it was never made, or somebody uses it by now
        folder.rmdir()
