"""What a check of equivalence found: the same record for every framework. Plain Python, no tensors.

A shell's `check_equivalence` fills it in: how far each gradient of the accumulated window is from the large batch's,
and the causes where they differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any, Literal

from gradaccum.errors import NotEquivalentError
from gradaccum.report import Bars, Block, Report, Table, Text, write

CauseKind = Literal[
    "batch_norm", "mixes_rows", "loss", "weight", "reduction", "regulariser", "input", "buffer", "padding", "hook",
    "gradient", "randomness", "nondeterminism", "rounding", "error", "unknown",
]  # fmt: skip
"""What makes accumulation differ from the large batch:

- `"batch_norm"`: a module normalises each micro-batch by itself.
- `"mixes_rows"`: another module in which a row's output depends on other rows.
- `"loss"`: the loss is not a mean (or sum) over rows, whatever their weights.
- `"weight"`: the loss is a mean over something other than what the micro-batches were weighed with.
- `"reduction"`: the loss is a sum where a mean was declared, or the other way round.
- `"regulariser"`: a term that doesn't depend on the rows is counted once per micro-batch.
- `"input"`: a tensor of the batch is split and should not be, or along another dimension.
- `"buffer"`: a buffer moves once per micro-batch in place of once per update.
- `"padding"`: columns that `max_tokens` cuts off count in the loss, or in the model.
- `"hook"`: a hook on a parameter's gradient that is not linear sees a part of it per micro-batch.
- `"gradient"`: the next backward pass overwrites the gradients of the one before, as in CUDA graphs.
- `"randomness"`: random numbers that cannot be replayed row by row.
- `"nondeterminism"`: the large batch's own gradient is not the same twice.
- `"rounding"`: a layer rounds to so few bits that each number of rows rounds otherwise (float8).
- `"error"`: a micro-batch raises where the large batch does not.
- `"unknown"`: none of these was found.
"""

Part = Literal["gradient", "loss", "buffer"]


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why accumulation differs from the large batch.

    Args:
        kind: One of `CauseKind`.
        where: A module's path, `"loss"`, or an input's path such as `"batch[1]['mask']"`.
        message: A sentence or two: what it does, and what to do about it.

    Example:
        >>> print(Cause("loss", "loss", "The loss looks across the rows."))
        The loss looks across the rows.
    """

    kind: CauseKind
    where: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor is from the large batch's.

    Args:
        name: The parameter's or buffer's path, or `"loss"`.
        error: Largest relative error over all partitions: `max|a - b| / max|b|`. inf if only one of the two is NaN.
        part: `"gradient"`, `"loss"`, or `"buffer"`.
        entries: Numbers in that tensor.
    """

    name: str
    error: float
    part: Part = "gradient"
    entries: int = 1

    @property
    def group(self) -> str:
        """The module that holds it: `"layer1.bn"` of `"layer1.bn.weight"`."""
        return self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Whether accumulating micro-batches gives the large batch's gradient, and if not, why.

    It is evidence, not proof: it holds for this batch, these partitions and the model's present mode. `notes` says what
    could not be excluded.

    Args:
        differences: One for the loss, one per parameter that has a gradient, one per buffer that moved.
        tolerance: The largest relative error that counts as rounding.
        causes: Why they differ; empty where they don't.
        rows: Rows of the large batch.
        partitions: The sizes of the micro-batches in each partition that was compared.
        notes: What the check had to leave out, in sentences.
        precision: The dtype in which it was computed, such as `"float64"`.
        device: Where it was computed, such as `"cpu"`.

    Example:
        >>> result = Equivalence(
        ...     differences=(Difference("loss", 1e-16, "loss"), Difference("bn.weight", 1.19)), tolerance=1e-9,
        ...     causes=(Cause("batch_norm", "bn", "'bn' is a BatchNorm2d: it normalises each micro-batch by itself."),),
        ...     rows=8, partitions=((5, 3),))
        >>> result.ok, result.max_error
        (False, 1.19)
        >>> result.raise_if_different()
        Traceback (most recent call last):
        gradaccum.errors.NotEquivalentError: accumulated gradients differ from the large batch's.
          bn.weight   relative error 1.19   (1e-09 allowed)
        'bn' is a BatchNorm2d: it normalises each micro-batch by itself.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    causes: tuple[Cause, ...] = ()
    rows: int = 0
    partitions: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    precision: str = "float64"
    device: str = "cpu"

    @property
    def ok(self) -> bool:
        """Whether every gradient, the loss and every buffer agree to within `tolerance`."""
        return max(self.max_error, self.max_buffer_error) <= self.tolerance and not self.causes

    @property
    def max_error(self) -> float:
        """The largest relative error of the loss and the gradients."""
        errors = [difference.error for difference in self.differences if difference.part != "buffer"]
        return max(errors, default=math.inf if self.causes else 0.0)

    @property
    def max_buffer_error(self) -> float:
        """The largest relative error of the buffers that are left behind."""
        return max((difference.error for difference in self.differences if difference.part == "buffer"), default=0.0)

    def groups(self) -> list[tuple[str, int, int, float]]:
        """The gradients, a line per module in the model's order: `(path, tensors, numbers in them, largest error)`."""
        found: dict[str, tuple[int, int, float]] = {}
        for difference in self.differences:
            if difference.part == "gradient":
                tensors, entries, error = found.get(difference.group, (0, 0, 0.0))
                found[difference.group] = (tensors + 1, entries + difference.entries, max(error, difference.error))
        return [(group, *line) for group, line in found.items()]

    def raise_if_different(self) -> Equivalence:
        """Return this record, or raise.

        Raises:
            NotEquivalentError: It is not `ok`; the message lists what differs most, and the causes.
        """
        if self.ok:
            return self
        wrong = [difference for difference in self.differences if not difference.error <= self.tolerance]
        wrong.sort(key=lambda difference: (["gradient", "loss", "buffer"].index(difference.part), -difference.error))
        width = max((len(difference.name) for difference in wrong[:5]), default=0)
        only_buffers = bool(wrong) and wrong[0].part == "buffer"
        lines = [f"{'buffers' if only_buffers else 'accumulated gradients'} differ from the large batch's."]
        lines += [
            f"  {d.name:<{width}}   relative error {d.error:.3g}   ({self.tolerance:.3g} allowed)" for d in wrong[:5]
        ]
        if len(wrong) > 5:
            lines.append(f"  ... and {len(wrong) - 5} more")
        raise NotEquivalentError("\n".join([*lines, *(str(cause) for cause in self.causes)]))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, fit for JSON (where an infinite error is the string `"inf"`)."""
        record = dataclasses.asdict(self)
        for difference in record["differences"]:
            difference["error"] = _for_json(difference["error"])
        errors = {"max_error": _for_json(self.max_error), "max_buffer_error": _for_json(self.max_buffer_error)}
        return {"ok": self.ok, **errors, **record}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def report(self) -> Report:
        """This result as a document: the verdict, a line per module, the causes and what to do, what was left out."""
        blocks: list[Block] = []
        if self.causes:
            kinds = [[cause.kind, repr(cause.where)] for cause in self.causes]
            blocks += [Table(["cause", "where"], kinds, "Causes"), *(Text(str(cause)) for cause in self.causes)]
        lines: list[tuple[str, str, int, int, float]]
        lines = [(d.part, d.name, 1, d.entries, d.error) for d in self.differences if d.part != "gradient"]
        lines += [("gradient", name or "(the model)", n, entries, error) for name, n, entries, error in self.groups()]
        if lines:
            caption = f"Largest relative error of each ({self.tolerance:.2g} allowed)"
            blocks.append(Table(["of", "module", "tensors", "numbers", "error"], lines, caption))
            finite = [line for line in lines if math.isfinite(line[-1])]
            drawn = {line[1]: line[-1] for line in sorted(finite, key=lambda line: -line[-1])[:20]}
            blocks.append(Bars("Largest relative errors", drawn, log=True, limits={"allowed": self.tolerance}))
        if self.partitions:
            sizes = "; ".join(dict.fromkeys(" + ".join(map(str, sizes)) for sizes in self.partitions))
            where = f"computed in {self.precision} on {self.device}"
            blocks.append(Text(f"{self.rows} rows at once against {sizes} rows, {where}."))
        blocks += [Text(f"Note: {note}") for note in self.notes]
        return Report("Micro-batches against the large batch", blocks, ok=self.ok, summary=self._summary())

    def _summary(self) -> str:
        error = self.max_error
        if self.ok:
            verdict = "The accumulated gradient is the large batch's"
        elif error <= self.tolerance < self.max_buffer_error:
            verdict = "The accumulated gradient is the large batch's, but the buffers left behind are NOT"
            error = self.max_buffer_error
        else:
            verdict = "The accumulated gradient is NOT the large batch's"
        return f"{verdict}: largest relative error {error:.3g} ({self.tolerance:.2g} allowed)."

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write it as a report: `.html` (one file, works offline), `.png`, `.txt`, or as the numbers in it: `.json`.

        Raises:
            ModuleNotFoundError: What draws it is not installed (`gradaccum[cli]`).
            ValueError: Another ending.
        """
        path = pathlib.Path(path)
        if path.suffix.lower() != ".json":
            return self.report().save(path)
        return write(path, f"{self.to_json()}\n".encode())

    def __str__(self) -> str:
        return str(self.report())


def limits_of(rows: int) -> list[str]:
    """What no check of so many rows can exclude."""
    few = f"{rows} rows allow few partitions: use a batch of 8 or more."
    return [
        *([few] if rows < 4 else []),
        "This is evidence from one batch, not a proof: other data, other sizes or another time in training may give "
        "another result.",
    ]


def _for_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
