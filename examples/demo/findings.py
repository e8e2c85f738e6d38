"""The demo's report: the attention network's memory and exactness, then runs on pictures side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from examples.demo.guide import Epoch, Outcome
from examples.demo.text import TextOutcome

from gradaccum.report import Bars, Block, Curve, Curves, Report, Table, Text

__all__ = ["findings"]

_FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras", "jax": "JAX"}


def findings(text: TextOutcome | None, guide: Outcome | None = None) -> Report:
    """The report of either part, or of both.

    Args:
        text: The attention network's three loops.
        guide: The guide's runs.

    Raises:
        ValueError: Neither was given.
    """
    parts = [part for part in (text, guide) if part is not None]
    if not parts:
        raise ValueError("The report needs one of the two parts. Received: neither.")
    blocks = [*(_text_blocks(text) if text else []), *(_guide_blocks(guide) if guide else [])]
    return Report(
        f"Gradient accumulation with {_FRAMEWORKS[guide.setup.framework if guide else 'torch']}: the large batch's "
        "update in the memory of the small one",
        blocks,
        ok=all(part.ok for part in parts),
        summary="\n".join([*(_text_summary(text) if text else []), *(_guide_summary(guide) if guide else [])]),
    )


def _mib(count: float | None) -> float | None:
    return None if count is None else count / 2**20


# The attention network.


def _text_summary(text: TextOutcome) -> list[str]:
    large, ours, written = text.loops
    same = "the same training" if text.ok else "but ANOTHER training"
    return [
        f"Attention network: {text.memory_ratio:.1f} times less memory, {same}. A whole batch takes "
        f"{large.peak_bytes / 2**20:.1f} MiB at its peak, {text.setup.steps} micro-batches "
        f"{ours.peak_bytes / 2**20:.2f} MiB.",
        f"Through gradaccum the parameters end {ours.distances[-1]:.1e} away from the whole batch's. The loop that "
        f"people write, with loss / {text.setup.steps}, ends {written.distances[-1]:.0%} away.",
    ]


def _text_blocks(text: TextOutcome) -> list[Block]:
    large, ours, _ = text.loops
    setup = text.setup
    size = setup.batch_size // setup.steps
    updates = range(1, len(large.losses) + 1)
    table = Table(
        ["loop", "peak, MiB", "distance from the whole batch", "test loss"],
        [
            [loop.name, _mib(loop.peak_bytes), f"{loop.distances[-1]:.1e}", f"{loop.losses[-1]:.5f}"]
            for loop in text.loops
        ],
        caption="Attention network on text",
    )
    gaps = {
        loop.name: [100 * (mine / theirs - 1) for mine, theirs in zip(loop.losses, large.losses, strict=True)]
        for loop in text.loops
    }
    return [
        table,
        Bars(
            "Attention network: peak memory of a window",
            {
                f"whole batch, {setup.batch_size} rows": large.peak_bytes / 2**20,
                f"{setup.steps} micro-batches of {size} rows": ours.peak_bytes / 2**20,
            },
            unit="MiB",
        ),
        Curves(
            "Distance from the whole batch's parameters",
            [Curve(loop.name, updates, [100 * value for value in loop.distances]) for loop in text.loops],
            "update",
            "% of the distance that those have moved",
        ),
        Curves(
            "Test loss, compared with the whole batch's",
            [Curve(name, updates, values) for name, values in gaps.items()],
            "update",
            "% more",
        ),
        Text(
            "A decoder of two attention blocks learns names and docstrings of Python's standard library: "
            f"{setup.rows} rows of up to {setup.length} characters, {len(large.losses)} updates of SGD with momentum "
            "in float64. Its memory is measured in float32, as one would train. The loop that people write divides "
            f"each micro-batch's mean by {setup.steps}. So a character in a short row weighs more than one in a long "
            f"row, and the last window of an epoch, which has {setup.rows % setup.batch_size or setup.batch_size} "
            "rows, weighs too little. gradaccum divides by the number of characters in the window."
        ),
    ]


# The guide's experiment.


def _guide_summary(guide: Outcome) -> list[str]:
    large, accumulated, *by_hand = guide.runs
    equal = "equal up to rounding" if guide.ok else "DIFFER"
    parts = []
    if guide.gradient_difference is not None:
        parts.append(f"their first gradients differ by {guide.gradient_difference:.1e}")
    parts.append(f"their parameters after {_count(large.updates, 'update')} by {guide.difference:.1e}")
    lines = [
        f"{guide.data_name}: (a) and (b) are {equal} in {guide.setup.dtype}: {', '.join(parts)}. Accuracy "
        f"{large.epochs[-1].accuracy:.2%} and {accumulated.epochs[-1].accuracy:.2%}."
        if guide.ok
        else f"{guide.data_name}: (a) and (b) {equal} in {guide.setup.dtype}: {', '.join(parts)}."
    ]
    if by_hand:
        lines.append(
            f"(b) takes {accumulated.seconds / by_hand[0].seconds:.2f} of the time of (c), the same micro-batches by "
            f"hand, whose parameters differ from (a)'s by {guide.difference_of(2):.1e}."
        )
    return lines


def _guide_blocks(guide: Outcome) -> list[Block]:
    setup, small = guide.setup, guide.setup.batch_size // guide.setup.steps
    by_hand = (
        f" (c) is the loop by hand, with loss / {setup.steps}, whose last window of an epoch may be shorter."
        if len(guide.runs) > 2
        else ""
    )
    blocks: list[Block] = [
        _guide_table(guide),
        Text(
            f"A network of two hidden layers with 512 units, plain SGD with learning rate {setup.learning_rate:g}, "
            f"{_count(setup.epochs, 'epoch')} of {guide.rows:,} rows from {guide.data_source}, in {setup.dtype}. "
            f"(a) takes {setup.batch_size} rows at once; (b) takes {small} rows at a time and wraps the optimizer with "
            f"{setup.steps} steps.{by_hand} All start from the same weights and see the same rows in the same order. "
            "Seconds are those of training, without start-up and tests; smaller passes use a processor less well. A "
            "difference is the largest max|a - b| / max|a| over all tensors."
        ),
    ]
    if guide.precision != setup.dtype:
        blocks.append(Text(f"This backend multiplies matrices in {guide.precision}, whatever the dtype."))
    elif setup.dtype == "float32":
        blocks.append(
            Text(
                "In float32 the two sums round differently, and where the input of a ReLU is next to zero, rounding "
                "decides whether the unit fires. Over thousands of updates such differences grow, as they do between "
                "any two runs on different machines. In float64, the default, they don't show."
            )
        )
    large, accumulated = guide.runs[:2]
    if large.peak_bytes and accumulated.peak_bytes and accumulated.peak_bytes > large.peak_bytes:
        blocks.append(
            Text(
                "This network is all parameters: its activations are a tenth of them, so they are not its peak. "
                "Adding to a sum of gradients takes room for one more layer's gradient, which is why (b) has the "
                "higher peak here; accumulation saves memory where activations fill it, as in the attention network."
            )
        )
    blocks += [
        _curves("Test loss, compared with (a)'s", "% more", guide, _more_loss),
        _curves("Test accuracy", "%", guide, lambda epoch, _: 100 * epoch.accuracy),
    ]
    return blocks


def _more_loss(epoch: Epoch, large: Epoch) -> float:
    return 100 * (epoch.test_loss / large.test_loss - 1)


def _guide_table(guide: Outcome) -> Table:
    runs = guide.runs
    columns: dict[str, list[Any]] = {
        "run": [run.plan.name for run in runs],
        "accuracy": [f"{run.epochs[-1].accuracy:.2%}" for run in runs],
        "loss": [f"{run.epochs[-1].test_loss:.5f}" for run in runs],
        "updates": [run.updates for run in runs],
        "seconds": [f"{run.seconds:.1f}" for run in runs],
        "peak, MiB": [_mib(run.peak_bytes) for run in runs],
        "differs from (a)": [None, *(f"{guide.difference_of(run):.1e}" for run in range(1, len(runs)))],
    }
    known = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    caption = f"{guide.data_name}: on the test rows, after the last epoch"
    return Table(list(known), list(zip(*known.values(), strict=True)), caption=caption)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _curves(title: str, label: str, guide: Outcome, value: Callable[[Epoch, Epoch], float]) -> Curves:
    large = guide.runs[0].epochs
    curves = [
        Curve(run.plan.name, range(1, len(large) + 1), list(map(value, run.epochs, large)), points=True)
        for run in guide.runs
    ]
    return Curves(title, curves, x_label="epoch", y_label=label)
