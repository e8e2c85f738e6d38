"""How far a long task is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from gradaccum.extras import require

__all__ = ["Progress"]


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

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, label: str, total: float | None) -> None:
        """Begin a task of `total` units (None where that is not known yet)."""
        self._label = label
        if self._bars is not None:
            self._task = self._bars.add_task(label, total=total, note="")

    def expect(self, total: float) -> None:
        """The task has so many units: known now."""
        if self._bars is not None:
            self._bars.update(self._task, total=total or None)

    def advance(self, units: float, note: str | None = None) -> None:
        """Go on by so many units; `note` is what there is to see right now."""
        if self._bars is not None:
            self._bars.update(self._task, advance=units, **({} if note is None else {"note": note}))

    def done(self, note: str = "") -> None:
        """End the task; `note` is its outcome, which is the line that plain output has of it."""
        if self._bars is not None:
            total = self._bars.tasks[self._task].total
            self._bars.update(self._task, total=total or 1, completed=total or 1, note=note)
        else:
            self.say(f"{self._label}: {note}" if note else self._label)

    def say(self, line: str) -> None:
        """Print a line, above the bars where there are any."""
        self._console.print(line, markup=False, soft_wrap=True)
