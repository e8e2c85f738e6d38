"""Where activations fill the memory: a small attention network on text, and the loop that people write. No framework.

The text is Python's own: the names and first paragraphs of the docstrings in its standard library, one row each, of
anything from one to 96 characters. The loss is a mean over characters, so a micro-batch of two names weighs less than
one of two paragraphs; and the last window of an epoch is shorter than the others. Three loops, in float64:

    large      a whole batch at once
    ours       16 micro-batches of its rows, through gradaccum
    written    the same, with `(loss / 16).backward()` and an update every 16th time and at the epoch's end
"""

from __future__ import annotations

import ast
import pathlib
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo.processes import call
from examples.demo.progress import Progress

__all__ = ["LARGE", "OURS", "WRITTEN", "Loop", "TextOutcome", "TextSetup", "perform", "python_text"]

LARGE, OURS, WRITTEN = "whole batch", "accumulated, gradaccum", "loss / 16, by hand"
"""The three loops."""

_MODULES = (
    "argparse", "ast", "calendar", "cmd", "configparser", "csv", "datetime", "difflib", "doctest", "functools",
    "inspect", "optparse", "os", "pdb", "random", "shutil", "statistics", "string", "subprocess", "tarfile",
    "textwrap", "threading", "typing", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class TextSetup:
    """What all three loops share.

    Args:
        rows: To train with; another 32 are for the test.
        batch_size: Rows of the large batch, 16 times those of a micro-batch.
        epochs: Passes over the rows.
        length: The most characters of a row.
        width: Of the network.
        learning_rate: Of SGD with momentum 0.9.
        steps: Micro-batches of a window.
    """

    rows: int = 200
    batch_size: int = 64
    epochs: int = 6
    length: int = 96
    width: int = 32
    learning_rate: float = 0.2
    steps: int = 16


@dataclass(frozen=True)
class Loop:
    """What one of the loops gave, after each update.

    Args:
        name: Its own.
        losses: The mean loss over the test's characters.
        distances: From the parameters of the large batch: the norm of the difference, as a part of how far those have
            moved.
        peak_bytes: At the peak of the first window: parameters, gradients, activations, what is made on the way; in
            float32, as one would train.
    """

    name: str
    losses: Sequence[float]
    distances: Sequence[float]
    peak_bytes: int


@dataclass(frozen=True)
class TextOutcome:
    """The three loops: the large batch, ours, and the one that people write."""

    setup: TextSetup
    loops: Sequence[Loop]

    @property
    def ok(self) -> bool:
        """Whether ours made the large batch's updates, to 1e-12. NaN is not."""
        return all(distance <= 1e-12 for distance in self.loops[1].distances)

    @property
    def memory_ratio(self) -> float:
        """How many times more the whole batch takes at its peak."""
        return self.loops[0].peak_bytes / self.loops[1].peak_bytes


def perform(setup: TextSetup, progress: Progress) -> TextOutcome:
    """The three loops, in a process of their own.

    Raises:
        RunError: It failed.
    """
    rows = python_text(setup.length)
    progress.start("attention network on text", total=3 * setup.epochs)
    arguments = (setup, rows[: setup.rows], rows[setup.rows :][:32])
    loops = call("The text", "examples.demo.text_torch", "train", arguments, lambda name: progress.advance(1, name))
    outcome = TextOutcome(setup, loops)
    progress.done(f"{outcome.memory_ratio:.1f} times less memory")
    return outcome


def python_text(length: int) -> list[str]:
    """Names and first paragraphs of docstrings in Python's standard library, no row twice, in a fixed random order."""
    found: dict[str, None] = {}
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        path = library / f"{module}.py"
        if not path.exists():  # later Pythons have made a package of it
            path = library / module / "__init__.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
                found |= {text.encode("ascii", "replace").decode()[:length]: None for text in (node.name, paragraph)}
    rows = [text for text in found if len(text) > 1]
    random.Random(0).shuffle(rows)
    return rows
