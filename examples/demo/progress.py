"""Progress of a long task: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import Any

from gradaccum.extras import require

__all__ = ["Progress"]

SECONDS = 5.0
"""Between two lines of one task where there is no terminal."""


class Progress:
    """Shows one task at a time on standard error. Used as a context manager.

    Example:
        >>> with Progress() as progress:
        ...     progress.start("reading", total=2)
        ...     progress.advance(2)
        ...     progress.done("2 rows")
    """

    def __init__(self) -> None:
        rich = require("rich.progress")
        self._console = require("rich.console").Console(stderr=True, highlight=False)
        self._bars: Any = None
        if self._console.is_terminal:
            self._bars = rich.Progress(
                rich.TextColumn("{task.description:<28}", markup=False),
                rich.BarColumn(),
                rich.TaskProgressColumn(),
                rich.TimeElapsedColumn(),
                rich.TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )
        self._task: Any = None
        self._label = ""
        self._total: float | None = None
        self._done = self._printed = 0.0

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, label: str, total: float | None) -> None:
        """Begin a task of `total` units (None where that is not known yet)."""
        self._label, self._total, self._done, self._printed = label, total, 0.0, time.monotonic()
        if self._bars is not None:
            self._task = self._bars.add_task(label, total=total, note="")
        else:
            self.say(f"{label} ...")

    def expect(self, total: float) -> None:
        """Set the number of units, which was not known at the start."""
        self._total = total or None
        if self._bars is not None:
            self._bars.update(self._task, total=self._total)

    def advance(self, units: float, note: str | None = None) -> None:
        """Go on by so many units; `note` is the latest result."""
        self._done += units
        if self._bars is not None:
            self._bars.update(self._task, advance=units, **({} if note is None else {"note": note}))
        elif time.monotonic() - self._printed >= SECONDS:
            self._printed = time.monotonic()
            part = f" {self._done / self._total:.0%}" if self._total else ""
            self.say(f"{self._label}:{part}{f', {note}' if note else ''}")

    def done(self, note: str = "") -> None:
        """End the task; `note` is its outcome."""
        if self._bars is not None:
            total = self._bars.tasks[self._task].total
            self._bars.update(self._task, total=total or 1, completed=total or 1, note=note)
        else:
            self.say(f"{self._label}: {note}" if note else self._label)

    def say(self, line: str) -> None:
        """Print a line, above the bars where there are any."""
        self._console.print(line, markup=False, soft_wrap=True)
