"""Is a loss the same when its batch is split? Asked once, with made-up numbers, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import ops, tree

from gradaccum.errors import NotEquivalentError
from gradaccum.keras.loss.divisors import Measured, weighed

__all__ = ["check_additive", "looks_across_rows", "not_additive"]

_ROWS, _FIRST = 5, 3
_TOLERANCE = 1e-4
"""Relative: far above the rounding of float32, far below what a loss that looks across rows differs by."""


def check_additive(model: Any, measured: Measured) -> None:
    """Refuse losses whose parts from the micro-batches don't add up to that of the whole batch.

    Raises:
        NotEquivalentError: There is such a loss; the message names it and says what to do.
    """
    for _, message in not_additive(model, measured):
        raise NotEquivalentError(message)


def not_additive(model: Any, measured: Measured) -> Iterator[tuple[str, str]]:
    """Of each loss that looks across rows, the output it belongs to, and what to say."""
    for index, (loss, *arguments) in measured.calls.items():
        if looks_across_rows(loss, *arguments):
            output = model._compile_loss._flat_losses[index].name
            advice = "Let it return one value per row"
            axis = getattr(loss, "_fn_kwargs", {}).get("axis", advice)
            if axis is not advice:
                advice += f", with an `axis` that leaves out the batch's dimension (axis={axis} now)"
            yield (
                output,
                f"The loss {loss.name!r} of {output!r} looks across the rows of its batch: its values for "
                f"micro-batches don't add up to that of the whole batch. {advice}. A function that returns a scalar "
                'must return the mean over rows; a sum over rows is a `keras.losses.Loss` with reduction="sum".',
            )


def looks_across_rows(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> bool:
    """Whether the loss of 5 random rows differs from what 3 and 2 of them add up to.

    Args:
        loss: A `keras.losses.Loss`.
        y_true, y_pred, sample_weight: Anything with the shapes and dtypes that the loss is called with; the numbers are
            made up: labels from {0, 1}, predictions between 0 and 1. A loss that can't be evaluated with these
            is taken to be what it says.
    """
    random = np.random.default_rng(0)
    try:
        whole = [
            tree.map_structure(lambda leaf: random.integers(0, 2, _shape(leaf)).astype("float32"), y_true),
            tree.map_structure(lambda leaf: random.uniform(0.05, 0.95, _shape(leaf)), y_pred),
            tree.map_structure(
                lambda leaf: None if leaf is None else random.uniform(0.5, 2, _shape(leaf)), sample_weight
            ),
        ]
        parts = [tree.map_structure(lambda a, rows=rows: None if a is None else a[rows], whole) for rows in _PARTS]
        value, count = _number(weighed(loss, *whole))
        added = 0.0
        for part, share in zip(parts, (_FIRST / _ROWS, 1 - _FIRST / _ROWS)):
            added += share * _number(weighed(loss, part[0], part[1], part[2], share, count))[0]
    except Exception:  # the made-up numbers are not for this loss
        return False
    return bool(np.isfinite(value) and abs(value - added) > _TOLERANCE * max(abs(value), abs(added)))


_PARTS = (slice(0, _FIRST), slice(_FIRST, None))


def _shape(leaf: Any) -> tuple[int, ...]:
    return (_ROWS, *(4 if size is None else int(size) for size in leaf.shape[1:]))


def _number(result: tuple[Any, Any]) -> tuple[float, float | None]:
    value, count = result
    value = float(ops.convert_to_numpy(ops.sum(value)))
    return value, None if count is None else float(ops.convert_to_numpy(count))
