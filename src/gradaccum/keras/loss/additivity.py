"""Which compiled losses look across rows: their value and gradient for a batch against those of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops, tree

from gradaccum.keras.loss.divisors import Measured, weighed
from gradaccum.keras.loss.gradients import value_and_gradients
from gradaccum.keras.private import compiled_losses, keras_mask, loss_entries, set_keras_mask

__all__ = ["coupled_losses"]


def coupled_losses(
    model: Any, measured: Measured, parts: Sequence[np.ndarray], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Of each loss that looks across rows, the output it belongs to, and what to say."""
    for index, (loss, *arguments) in measured.calls.items():
        if _couples_rows(loss, arguments, parts, tolerance):
            output = loss_entries(compiled_losses(model))[index].name
            advice = "Let it return one value per row"
            axis = getattr(loss, "_fn_kwargs", {}).get("axis", advice)
            if axis is not advice:
                advice += f", with an `axis` that leaves out the batch's dimension (axis={axis} now)"
            yield (
                output,
                f"The loss {loss.name!r} of {output!r} looks across the rows of its batch: its values or gradients for "
                f"micro-batches don't add up to those of the whole batch. {advice}. A function that returns a scalar "
                'must return the mean over rows; a sum over rows is a `keras.losses.Loss` with reduction="sum". For a '
                "loss that is meant to compare rows, take gradaccum.keras.chunked(model, micro_batch_size) in place of "
                "micro_batched: the same memory, for any loss.",
            )


def _couples_rows(loss: Any, arguments: Sequence[Any], parts: Sequence[np.ndarray], tolerance: float) -> bool:
    y_true, y_pred, sample_weight = arguments
    rows = sum(map(len, parts))
    predictions = tree.flatten(y_pred)
    masks = [keras_mask(output) for output in predictions]
    count: Any = None

    def result(of: np.ndarray, share: float) -> tuple[float, list[np.ndarray]]:
        def value(values: list[Any]) -> Any:
            nonlocal count
            outputs = [
                output if mask is None else _masked(output, ops.take(mask, of, axis=0))
                for output, mask in zip(values, masks)
            ]
            taken = _rows(y_true, of), tree.pack_sequence_as(y_pred, outputs), _rows(sample_weight, of), share
            if count is None:  # of the whole batch, which comes first
                count = weighed(loss, *taken)[1]
            return ops.sum(weighed(loss, *taken, count)[0]) * share

        number, gradients = value_and_gradients(value, [ops.take(output, of, axis=0) for output in predictions])
        return float(ops.convert_to_numpy(number)), [np.zeros(1) if g is None else _array(g) for g in gradients]

    whole, gradient = result(np.arange(rows), 1.0)
    try:
        results = [result(part, len(part) / rows) for part in parts]
    except Exception:  # it can't be computed for a part
        return True
    added = sum(part for part, _ in results)
    pairs: list[tuple[Any, Any]] = [(whole, added)]
    back = np.argsort(np.concatenate(list(parts)))
    for index, expected in enumerate(gradient):
        pieces = [gradients[index] for _, gradients in results]
        pairs.append((expected, np.concatenate(pieces)[back] if len(expected) == rows else sum(pieces)))
    return any(_differ(np.asarray(a), np.asarray(b), tolerance) for a, b in pairs)


def _differ(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return True
    scale = max(np.abs(a[finite]).max(initial=0.0), np.abs(b[finite]).max(initial=0.0))
    return bool(np.abs(a - b)[finite].max(initial=0.0) > tolerance * scale)


def _masked(output: Any, mask: Any) -> Any:
    output = output * 1.0
    set_keras_mask(output, mask)
    return output


def _rows(data: Any, of: np.ndarray) -> Any:
    def taken(leaf: Any) -> Any:
        return ops.take(leaf, of, axis=0) if len(getattr(leaf, "shape", ())) else leaf

    return tree.map_structure(taken, data)


def _array(tensor: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(tensor, "float64" if tensor.dtype == "float64" else "float32"))
