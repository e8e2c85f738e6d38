"""What the three runs show, as a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradaccum.demo.experiment import Epoch, Outcome, Run
from gradaccum.report import Bars, Block, Curve, Curves, Report, Table, Text, format_bytes

__all__ = ["findings"]


def findings(outcome: Outcome) -> Report:
    """The report: one table, the three curves, the memory, and whether (a) and (b) are equal."""
    setup = outcome.setup
    large, accumulated, _ = outcome.runs
    blocks: list[Block] = [Text(_what_was_done(outcome)), _table(outcome)]
    blocks += [Text(line) for line in _remarks(large, accumulated)]
    if outcome.precision != setup.dtype:
        blocks.append(Text(f"This backend multiplies matrices in {outcome.precision}, whatever the dtype."))
    elif setup.dtype == "float32" and outcome.ok:
        blocks.append(Text(_ABOUT_ROUNDING))
    blocks += [
        _curves("Test loss", "mean cross-entropy", outcome, lambda epoch: epoch.test_loss),
        _curves("Test accuracy", "accuracy (%)", outcome, lambda epoch: 100 * epoch.accuracy),
    ]
    for title, kibibytes in (
        ("Activations of a micro-batch", {run.plan.name: run.activation_bytes for run in outcome.runs}),
        ("Peak memory of a window", {run.plan.name: run.peak_bytes for run in outcome.runs}),
    ):
        known = {name: number / 2**10 for name, number in kibibytes.items() if number is not None}
        if known:
            blocks.append(Bars(title, known, unit="KiB"))
    return Report(
        f"Gradient accumulation on {outcome.data_name}, with {_FRAMEWORKS[setup.framework]}",
        blocks,
        ok=outcome.ok,
        summary=_verdict(outcome),
    )


_ABOUT_ROUNDING = (
    "In float32 the two round differently now and then. Where the input of a ReLU lies next to zero, that decides "
    "whether the unit fires, and over thousands of updates such differences grow. --dtype float64 shows the same "
    "comparison without them."
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
    return f"(a) and (b) {'are equal but for rounding' if outcome.ok else 'DIFFER'}: {after}."


def _what_was_done(outcome: Outcome) -> str:
    large, _, alone = outcome.runs
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


def _table(outcome: Outcome) -> Table:
    runs = outcome.runs
    columns: dict[str, list[Any]] = {
        "run": [run.plan.name for run in runs],
        "accuracy": [f"{run.epochs[-1].accuracy:.2%}" for run in runs],
        "loss": [f"{run.epochs[-1].test_loss:.5f}" for run in runs],
        "updates": [run.updates for run in runs],
        "seconds": [f"{run.seconds:.1f}" for run in runs],
        "activations": [run.activation_bytes and format_bytes(run.activation_bytes) for run in runs],
        "peak memory": [run.peak_bytes and format_bytes(run.peak_bytes) for run in runs],
        "differs from (a)": [None, f"{outcome.difference:.1e}", None],
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
