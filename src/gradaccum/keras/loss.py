"""What each compiled loss of a Keras model divides by, and whether micro-batches add up to the large batch.

A large batch's loss is `sum_j N_j / D_j` over the compiled losses j (one or several per output), where `N_j` is a sum
over rows and `D_j` what `keras.losses.Loss` divides it by:

| `reduction` | `D_j` |
|---|---|
| `"sum_over_batch_size"`, `"mean"` | the number of values: proportional to rows |
| the same, with a mask (`Masking`, `Embedding(mask_zero=True)`, `ignore_class`) | what it lets through |
| `"mean_with_sample_weight"` | the sum of the weights, of those that the mask lets through |
| `"sum"`, `None` | nothing |

Where `call` returns a scalar, the mean over its rows, Keras multiplies it with weights and mask, and reduces that: to
the scalar times their sum or mean, as `reduction` says. This factor is taken from the whole batch.

A micro-batch i of `rows_i` rows would return `N_ij / D_ij`. Its part of the large batch's loss is `N_ij / D_j`, so each
loss is made to return

    N_ij / (D_j share_i)          share_i = rows_i / rows

and what `compute_loss` returns is multiplied with `share_i`. Where the loss divides by rows, that is its own value; and
everything else that `compute_loss` adds (weight and activity regularisers, `add_loss`, the user's own terms) is a mean
over rows, or the same for all of them, and comes out right with `share_i` alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.numpy_arrays import relative_error
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import Scope, as_dtype, has_rows, is_float, loss_and_outputs, times


@dataclass
class Measured:
    """What `weighed_losses` saw while the loss of one micro-batch was computed; all by the index of a loss."""

    divisors: dict[int, Any] = field(default_factory=dict)
    """Of each loss that divides by neither rows nor nothing: `D_ij`, a scalar tensor; or the two sums behind a scalar's
    factor. They add up over micro-batches."""
    calls: dict[int, tuple[Any, Any, Any, Any]] = field(default_factory=dict)
    """The loss object and the arguments that it was called with."""
    values: dict[int, Any] = field(default_factory=dict)
    """Of each loss that has a tracker (with several losses, `fit` logs each): what the tracker would have been told,
    which is the micro-batch's part of the large batch's value, over `share`."""


@contextlib.contextmanager
def weighed_losses(model: Any, share: Any = 1.0, totals: dict[int, Any] | None = None) -> Iterator[Measured]:
    """While this is open, `model.compute_loss` returns a micro-batch's part of the large batch's loss, over `share`."""
    measured = Measured()

    def weighed_loss(index: int, loss: Any) -> Callable[..., Any]:
        def in_its_place(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            measured.calls[index] = (loss, y_true, y_pred, sample_weight)
            value, count = _weighed(loss, y_true, y_pred, sample_weight, share, (totals or {}).get(index))
            if count is not None:
                measured.divisors[index] = count
            return value

        return in_its_place

    losses = private.compiled_losses(model)
    with private.replaced_losses(losses, weighed_loss, functools.partial(_SilentTracker, measured)):
        yield measured


def update_trackers(model: Any, values: list[Any], rows: Any) -> None:
    """Tell the trackers of the single losses their values over the whole batch, as plain `fit` does once per update."""
    losses = private.compiled_losses(model)
    for tracker, value in zip([] if losses is None else losses.metrics, values):
        tracker.update_state(value, sample_weight=rows)


class _SilentTracker:
    """Stands in for the tracker of one loss, and keeps what it is told to itself."""

    def __init__(self, measured: Measured, index: int, tracker: Any) -> None:
        self.measured, self.index, self.tracker = measured, index, tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.measured.values[self.index] = value


def _weighed(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None, share: Any = 1.0, total: Any = None
) -> tuple[Any, Any]:
    """A micro-batch's part of the large batch's loss, over `share`; and `D_ij`, or None where it isn't counted."""
    values, mask = list[Any](), private.keras_mask(y_pred)

    def recording(y_true: Any, y_pred: Any, call: Callable[..., Any] = loss.call) -> Any:
        values.append(call(y_true, y_pred))
        return values[-1]

    # On PyTorch, Keras multiplies the weights with a mask in place, of the outputs or of the values.
    given = sample_weight if sample_weight is None else ops.copy(sample_weight)
    with private.replaced(loss, call=recording):  # what it returns before it is reduced
        value = loss(y_true, y_pred, given)
    if not values:
        return value, None
    own_mask = private.keras_mask(values[-1])
    if own_mask is not None:
        mask = own_mask if mask is None else ops.logical_and(mask, own_mask)
    exactly = type(loss).__call__ is keras.losses.Loss.__call__
    how = getattr(loss, "reduction", "sum_over_batch_size"), mask, sample_weight, share, total, exactly
    return (_part_of_values if has_rows(values[-1]) else _part_of_scalar)(loss, value, values[-1], *how)


def _part_of_values(
    loss: Any, value: Any, values: Any, reduction: Any, mask: Any, weights: Any, share: Any, total: Any, exactly: bool
) -> tuple[Any, Any]:
    """The same of a loss that returns a value for each row, and reduces them to `value`."""
    if reduction in ("sum", "none", None):
        return value / as_dtype(share, value.dtype), None
    divides = weights if reduction == "mean_with_sample_weight" else None
    if mask is None and divides is None:
        return value, None
    count = ops.cast(ops.stop_gradient(_count(mask, divides, values.dtype)), value.dtype)
    exactly = exactly and divides is not None
    if total is None and not exactly:
        return value, count
    total = _not_zero(count) / share if total is None else ops.cast(total, value.dtype)
    # `ops.divide_no_nan` would fall back to float32 on PyTorch.
    divisor = times(_not_zero(total), share)
    if not exactly:
        return value * (count / divisor), count
    # The sum itself: weights of both signs may cancel in a micro-batch, and its mean is 0 then.
    summed = private.reduce_weighted_values(values, weights, mask, "sum", loss.dtype)
    part = private.scale_loss_for_distribution(summed / divisor)
    return ops.where(total != 0, part, ops.zeros_like(part)), count


def _part_of_scalar(
    loss: Any, value: Any, scalar: Any, reduction: Any, mask: Any, weights: Any, share: Any, total: Any, exactly: bool
) -> tuple[Any, Any]:
    """The same of a loss that returns a scalar, a mean over rows (or it is refused), which weights and mask scale."""
    if (mask is None and weights is None) or has_rows(value) or not exactly:
        return value, None
    dtype = value.dtype
    valid = _count(ops.ones_like(weights) if mask is None else mask, None, dtype)
    weighed = valid if weights is None else _count(mask, weights, dtype)
    count = ops.stop_gradient(ops.cast(ops.stack([weighed, valid]), dtype))
    if isinstance(share, float) and share == 1.0:
        return value, count
    weighed, valid = ops.unstack(count / share if total is None else ops.cast(total, dtype), 2)
    if reduction == "sum":
        return ops.cast(scalar, dtype) * weighed, count
    factor = ops.cast(weighed != 0, dtype) if reduction == "mean_with_sample_weight" else weighed / _not_zero(valid)
    return private.scale_loss_for_distribution(ops.cast(scalar, dtype) * factor), count


def _not_zero(count: Any) -> Any:
    return ops.where(count != 0, count, ops.ones_like(count))


def _count(mask: Any, weights: Any, dtype: Any) -> Any:
    """`D_ij` up to a factor that is the same for all micro-batches, as `reduce_weighted_values` of Keras' has it."""
    dtype = keras.backend.standardize_dtype(dtype)
    mask, weights = (None if one is None else ops.cast(one, dtype) for one in (mask, weights))
    if mask is None or weights is None:
        return ops.sum(weights if mask is None else mask)
    mask, weights = private.squeeze_or_expand_to_same_rank(mask, weights)
    return ops.sum(weights * mask)


def take_rows(data: Any, rows: np.ndarray) -> Any:
    """These rows of a batch."""
    take = backends.running().take_rows
    return tree.map_structure(lambda leaf: take(leaf, rows) if has_rows(leaf) else leaf, data)


def as_array(value: Any) -> np.ndarray:
    """A tensor as numbers, half precision in float32."""
    is_narrow = is_float(value) and "64" not in keras.backend.standardize_dtype(value.dtype)
    return np.array(ops.convert_to_numpy(ops.cast(value, "float32") if is_narrow else value))


def divisors_of(model: Any, state: Sequence[Any], x: Any, y: Any, sample_weight: Any) -> tuple[Measured, Any]:
    """One forward pass without side effects, for what it tells and its loss: masks are known only after it."""
    parts = zip((model.trainable_variables, model.non_trainable_variables, model.metrics_variables), state)
    values = [pair for variables, values in parts for pair in zip(variables, values)]
    with Scope(values), weighed_losses(model) as measured:
        loss, _ = loss_and_outputs(model, x, y, sample_weight)
    return measured, loss


# Losses that look across rows.


def coupled_losses(
    model: Any, measured: Measured, parts: Sequence[np.ndarray], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Of each compiled loss whose value or gradient isn't that of its parts, the output, and what to say."""
    for index, (loss, *arguments) in measured.calls.items():
        if _couples_rows(loss, arguments, parts, tolerance):
            output = private.loss_entries(private.compiled_losses(model))[index].name
            advice, settings = "Let it return one value per row", getattr(loss, "_fn_kwargs", {})
            if "axis" in settings:
                advice += f", with an `axis` that leaves out the batch's dimension (axis={settings['axis']} now)"
            yield (
                output,
                f"The loss {loss.name!r} of {output!r} looks across the rows of its batch: its values or gradients for "
                f"micro-batches don't add up to those of the whole batch. {advice}. A function that returns a scalar "
                'must return the mean over rows; for a sum over rows, use a `keras.losses.Loss` with reduction="sum". '
                "For a loss that is meant to compare rows, use gradaccum.keras.chunked(model, micro_batch_size) in "
                "place of micro_batched: it needs the same memory and takes any loss.",
            )


def _couples_rows(loss: Any, arguments: Sequence[Any], parts: Sequence[np.ndarray], tolerance: float) -> bool:
    (y_true, y_pred, sample_weight), rows = arguments, sum(map(len, parts))
    predictions = tree.flatten(y_pred)
    masks = [private.keras_mask(output) for output in predictions]
    count: Any = None

    def result(of: np.ndarray) -> tuple[Any, list[Any]]:
        share = len(of) / rows

        def value(outputs: list[Any]) -> Any:
            nonlocal count
            for place, mask in enumerate(masks):
                if mask is not None:
                    outputs[place] = outputs[place] * 1.0
                    private.set_keras_mask(outputs[place], ops.take(mask, of, axis=0))
            taken = take_rows(y_true, of), tree.pack_sequence_as(y_pred, outputs), take_rows(sample_weight, of)
            found, own = _weighed(loss, *taken, share, count)
            count = own if count is None else count  # of the whole batch, which comes first
            return ops.sum(found) * share, None

        run = backends.running().value_and_gradients
        (number, _), gradients = run(value, [ops.take(output, of, axis=0) for output in predictions])
        return as_array(number), [np.zeros(1) if gradient is None else as_array(gradient) for gradient in gradients]

    whole, gradients = result(np.arange(rows))
    try:
        values, found = zip(*map(result, parts))
    except Exception:  # it can't be computed for a part
        return True
    order = np.argsort(np.concatenate(list(parts)))
    return relative_error(sum(values), whole) > tolerance or not same_rows(found, gradients, order, tolerance)


def same_rows(parts: Sequence[Any], whole: list[np.ndarray], order: np.ndarray, allowed: float) -> bool:
    """Whether arrays of the parts, put together in this order, are those of the whole batch."""

    def same(actual: np.ndarray, expected: np.ndarray) -> bool:
        if expected.dtype.kind not in "fV":
            return np.array_equal(actual, expected)
        return relative_error(actual, expected) <= allowed

    for index, expected in enumerate(whole):
        pieces = [part[index] for part in parts]
        if any(piece.shape[1:] != expected.shape[1:] for piece in pieces):
            return False
        found = np.concatenate(pieces)
        by_rows = len(order) == len(found) == len(expected)
        if not (same(found[order], expected) if by_rows else all(same(piece, expected) for piece in pieces)):
            return False
    return True
