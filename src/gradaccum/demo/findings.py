"""What the three runs show, as a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradaccum.demo.experiment import Epoch, Outcome, Run
from gradaccum.demo.text import TextOutcome
from gradaccum.report import Bars, Block, Curve, Curves, Report, Table, Text

__all__ = ["findings"]


def findings(outcome: Outcome, again: Outcome | None = None, text: TextOutcome | None = None) -> Report:
    """The report: the key number first, then one table, curves and memory, and whether (a) and (b) are equal.

    Args:
        outcome: The three runs.
        again: (a) and (b) once more, in float64.
        text: The attention network on text.
    """
    setup = outcome.setup
    blocks: list[Block] = [*_figures_of_text(text)] if text else []
    blocks += [Text(_what_was_done(outcome)), _table(outcome, again)]
    blocks += [Text(line) for line in _remarks(*outcome.runs[:2])]
    if outcome.precision != setup.dtype:
        blocks.append(Text(f"This backend multiplies matrices in {outcome.precision}, whatever the dtype."))
    elif setup.dtype == "float32" and outcome.ok:
        where = f"The last column, of {again.rows:,} rows in float64," if again else "--dtype float64"
        blocks.append(Text(f"{_ABOUT_ROUNDING} {where} shows the same comparison without them."))
    alone = outcome.runs[-1]
    more = alone.updates / outcome.runs[0].updates
    blocks += [
        _curves("Test loss", "mean cross-entropy", outcome, lambda epoch: epoch.test_loss),
        _curves(
            f"Test accuracy; (c) makes {more:.3g} times the updates",
            "accuracy (%)",
            outcome,
            lambda epoch: 100 * epoch.accuracy,
        ),
    ]
    activations = {run.plan.name: run.activation_bytes for run in outcome.runs}
    peaks = {} if text else {run.plan.name: run.peak_bytes for run in outcome.runs}
    for title, numbers in (("Activations of a micro-batch", activations), ("Peak memory of a window", peaks)):
        known = {name: number / 2**20 for name, number in numbers.items() if number is not None}
        if known:
            blocks.append(Bars(title, known, unit="MiB"))
    verdicts = [*_verdict_of_text(text), _verdict(outcome), *([_verdict(again)] if again else [])]
    on = f"text and {outcome.data_name}" if text else outcome.data_name
    return Report(
        f"Gradient accumulation on {on}, with {_FRAMEWORKS[setup.framework]}",
        blocks,
        ok=all(part.ok for part in (outcome, again, text) if part is not None),
        summary="\n".join(verdicts),
    )


def _verdict_of_text(text: TextOutcome | None) -> list[str]:
    if text is None:
        return []
    large, ours, written = text.loops
    same = "the same training" if text.ok else "but ANOTHER training"
    return [
        f"{text.memory_ratio:.1f} times less memory, {same}: {large.peak_bytes / 2**20:.1f} MiB at the peak of a "
        f"window as a whole batch, {ours.peak_bytes / 2**20:.2f} MiB in {text.setup.steps} micro-batches.",
        f"In float64 they end {ours.distances[-1]:.1e} apart. The loop that people write ends "
        f"{written.distances[-1]:.0%} away: it divides each loss by {text.setup.steps}.",
    ]


def _figures_of_text(text: TextOutcome) -> list[Block]:
    large, ours, _ = text.loops
    setup = text.setup
    size = setup.batch_size // setup.steps
    updates = range(1, len(large.losses) + 1)
    gaps = {
        loop.name: [100 * (mine / theirs - 1) for mine, theirs in zip(loop.losses, large.losses, strict=True)]
        for loop in text.loops
    }
    return [
        Bars(
            "Attention network: peak of a window",
            {
                f"whole batch, {setup.batch_size} rows": large.peak_bytes / 2**20,
                f"{setup.steps} micro-batches of {size} rows": ours.peak_bytes / 2**20,
            },
            unit="MiB",
        ),
        Curves(
            "How far from the whole batch's parameters",
            [Curve(loop.name, updates, [100 * value for value in loop.distances]) for loop in text.loops],
            "update",
            "% of how far those have moved",
        ),
        Curves(
            "Test loss, against the whole batch's",
            [Curve(name, updates, values) for name, values in gaps.items()],
            "update",
            "% more",
        ),
        Text(
            f"A decoder of two attention blocks learns names and docstrings of Python's standard library, "
            f"{setup.rows} rows of up to {setup.length} characters, {len(large.losses)} updates of SGD with momentum, "
            f"in float64; the memory is float32's. The loop that people write divides each micro-batch's mean by "
            f"{setup.steps}, and so gives a character in a short row more weight than one in a long row, and the "
            f"last window of an epoch, of {setup.rows % setup.batch_size or setup.batch_size} rows, less than its due. "
            "gradaccum divides by the characters that the window holds."
        ),
    ]


_ABOUT_ROUNDING = (
    "In float32 the two round differently now and then. Where the input of a ReLU lies next to zero, that decides "
    "whether the unit fires, and over thousands of updates such differences grow."
)
_FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras", "jax": "JAX"}


def _verdict(outcome: Outcome) -> str:
    updates = _count(outcome.runs[0].updates, "update")
    after = (
        f"after {updates} their parameters differ by at most {outcome.difference:.1e} ({outcome.allowed:.0e} allowed)"
    )
    if outcome.gradient_difference is not None:
        after = (
            f"in the first update their gradients differ by at most {outcome.gradient_difference:.1e} "
            f"({outcome.gradient_allowed:.0e} allowed in {outcome.precision}), {after}"
        )
    return f"(a) and (b) {'are equal but for rounding' if outcome.ok else 'DIFFER'} in {outcome.setup.dtype}: {after}."


def _what_was_done(outcome: Outcome) -> str:
    large, alone = outcome.runs[0], outcome.runs[-1]
    setup, small = outcome.setup, outcome.setup.batch_size // outcome.setup.steps
    each = "each in a process of its own"
    if setup.ranks > 1:
        each += f", and (b) in {setup.ranks}, each of which has its part of every window"
    return (
        f"A network of two hidden layers with 512 units, plain SGD with learning rate {setup.learning_rate:g}, "
        f"{_count(setup.epochs, 'epoch')} of {outcome.rows:,} rows from {outcome.data_source}, in {setup.dtype}. "
        f"(a) takes {setup.batch_size} rows at once. (b) takes {small} rows at a time and wraps its optimizer with "
        f"{setup.steps // setup.ranks} steps; nothing else differs. (c) takes {small} rows at a time and wraps "
        f"nothing. All three start from the same weights and see the same rows in the same order, {each}. "
        f"(c) makes {_count(alone.updates, 'update')} where (a) makes {large.updates:,}, with the same learning rate: "
        "another training."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _table(outcome: Outcome, again: Outcome | None) -> Table:
    runs = outcome.runs
    columns: dict[str, list[Any]] = {
        "run": [run.plan.name for run in runs],
        "accuracy": [f"{run.epochs[-1].accuracy:.2%}" for run in runs],
        "loss": [f"{run.epochs[-1].test_loss:.5f}" for run in runs],
        "updates": [run.updates for run in runs],
        "seconds": [f"{run.seconds:.1f}" for run in runs],
        "activations, MiB": [run.activation_bytes and run.activation_bytes / 2**20 for run in runs],
        "peak, MiB": [run.peak_bytes and run.peak_bytes / 2**20 for run in runs],
        "differs from (a)": [None, f"{outcome.difference:.1e}", None],
        "in float64": [None, again and f"{again.difference:.1e}", None],
    }
    known = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    return Table(list(known), list(zip(*known.values(), strict=True)), caption="On the test rows, after the last epoch")


def _remarks(large: Run, accumulated: Run) -> list[str]:
    remarks = [
        "Seconds are those of training, without start-up and tests. A difference is the largest max|a - b| / max|a| "
        "over all tensors."
    ]
    if large.activation_bytes is None or accumulated.activation_bytes is None:
        return remarks
    if large.peak_bytes is None or accumulated.peak_bytes is None:
        return remarks
    ratio = accumulated.activation_bytes / large.activation_bytes
    memory = (
        "Memory is counted in tensors, over one window: activations are a micro-batch's rows and what its forward pass "
        "keeps for the backward pass; the peak has parameters and gradients in it as well. Activations grow with the "
        f"rows: (b) takes {ratio:.2g} times as much as (a)."
    )
    if accumulated.peak_bytes > large.peak_bytes:
        memory += (
            " In a network this small they are not the peak, though: while a sum of gradients is kept, a layer's next "
            "gradient needs room beside it. Where activations fill the memory, accumulation frees most of it."
        )
    return [*remarks, memory]


def _curves(title: str, label: str, outcome: Outcome, value: Callable[[Epoch], float]) -> Curves:
    curves = [
        Curve(run.plan.name, range(1, len(run.epochs) + 1), [value(epoch) for epoch in run.epochs])
        for run in outcome.runs
    ]
    return Curves(title, curves, x_label="epoch", y_label=label)
