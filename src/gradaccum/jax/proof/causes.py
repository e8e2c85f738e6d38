"""Why micro-batches differ from the large batch: the loss, its weight, the state or an input, by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from gradaccum.core.causes import LossFacts, LossSplit, coupling_cause, halves, loss_cause, shared_input
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.numpy_arrays import leaf_of
from gradaccum.core.ways import Way
from gradaccum.jax.loss import Verdict
from gradaccum.jax.proof.trial import Trial

_FITS = 1e-4
"""What shares and sums may be off by: causes differ by far more."""


def find_causes(trial: Trial, ways: Sequence[Way], differences: Sequence[Difference], verdict: Verdict) -> Cause:
    """The most certain cause."""
    wrong = [difference for difference in differences if not difference.error <= trial.tolerance]
    moved = [difference.name for difference in wrong if difference.part == "buffer"]
    if verdict.kind == "randomness":
        return Cause("randomness", "loss", verdict.message)
    if len(moved) == len(wrong):
        return Cause(
            "buffer",
            moved[0],
            f"The state {moved[0]!r} moves once per micro-batch, each time from where the last one left it and with "
            "the statistics of fewer rows. Loss and gradient are the large batch's.",
        )
    if (path := _shared_input(trial, ways)) is not None:
        what = "is split into micro-batches, but every row needs all of it. Pass in_axes with None for it."
        return Cause("input", path, f"{path} {what}")
    told, seen = _told_by_splits(trial), verdict.kind if verdict.certain and verdict.kind != "batch_norm" else ""
    if seen and (told is None or told.kind != seen):
        return Cause(seen, "loss", verdict.message)  # type: ignore[arg-type]  # its kinds are causes' kinds
    if told is None and moved:
        return Cause(
            "batch_norm",
            moved[0],
            f"A row's output depends on the other rows of its micro-batch, and the state {moved[0]!r} moves with them, "
            "as BatchNorm's statistics do in training mode. Freeze it (use its running averages), or take GroupNorm or "
            "LayerNorm.",
        )
    return told or coupling_cause(_ACROSS_ROWS)


_ACROSS_ROWS = (
    "a layer does (BatchNorm in training mode). For the former use gradaccum.jax.chunked around the model, which gives "
    "the large batch's gradient for any loss."
)


def _shared_input(trial: Trial, ways: Sequence[Way]) -> str | None:
    split = {path: position for position, (path, axis, _) in enumerate(trial.leaves()) if axis is not None}
    others = [(path, functools.partial(trial.sharing, position)) for path, position in split.items() if len(split) > 1]
    return shared_input(others, ways, trial.tolerance)


def _told_by_splits(trial: Trial) -> Cause | None:
    """What is wrong with the loss, if it doesn't just look across rows, of which what is seen in it says more."""
    parts = halves([[row] for row in range(trial.rows)], [max(1, (3 * trial.rows) // 8)] * 3)
    cause = loss_cause([LossSplit(rows, trial.vector) for rows in parts], _facts(trial))
    return None if cause is None or cause.kind == "loss" else cause


def _facts(trial: Trial) -> LossFacts:
    """What is known of the loss, in the user's words."""
    is_mean = trial.options["reduction"] == "mean"
    weighed = "what `weight` returns" if trial.options["weight"] is not None else "rows"
    return LossFacts(
        trial.options["reduction"],
        weighed if is_mean else "nothing, because they were treated as sums",
        trial.weight,
        [leaf_of(path, path, array) for path, array in trial.arrays().items()],
        [trial.names[number] for number in trial.batches],
        "Leave `weight` out",
        "Pass weight=, a function of the batch that returns what the loss divides by.",
        _ACROSS_ROWS,
        fits=_FITS,
    )
