"""What each compiled loss of a Keras model divides by.

A large batch's loss is `sum_j N_j / D_j` over the compiled losses j (one or several per output), where `N_j` is a sum
over rows and `D_j` what `keras.losses.Loss` divides it by:

| `reduction` | `D_j` |
|---|---|
| `"sum_over_batch_size"`, `"mean"` | the number of values: proportional to rows |
| the same, with a mask (`Masking`, `Embedding(mask_zero=True)`, `ignore_class`) | what it lets through |
| `"mean_with_sample_weight"` | the sum of the weights, of those that the mask lets through |
| `"sum"`, `None` | nothing |

A micro-batch i of `rows_i` rows would return `N_ij / D_ij`. Its part of the large batch's loss is `N_ij / D_j`, so each
loss is made to return

    N_ij / (D_j share_i)          share_i = rows_i / rows

and what `compute_loss` returns is multiplied with `share_i`. Where the loss divides by rows, that is its own value; and
everything else that `compute_loss` adds (weight and activity regularisers, `add_loss`, the user's own terms) is a mean
over rows, or the same for all of them, and comes out right with `share_i` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import ops

from gradaccum.keras.private import (
    compiled_losses,
    keras_mask,
    reduce_weighted_values,
    replaced_losses,
    scale_loss_for_distribution,
    set_added_losses,
    squeeze_or_expand_to_same_rank,
    takes_training,
)

__all__ = ["Measured", "divisors_of", "update_trackers", "weighed", "weighed_losses"]


@dataclass
class Measured:
    """What `weighed_losses` saw while the loss of one micro-batch was computed.

    Attributes:
        divisors: Of each loss that divides by neither rows nor nothing, by its index: `D_ij`, a scalar tensor.
        calls: Of each loss, by its index: the loss object and the arguments it was called with.
        values: Of each loss that has a tracker (with several losses, `fit` logs each): what the tracker would have
            been told, which is the micro-batch's part of the large batch's value, over `share`.
        added: Whether the forward pass left terms beside the compiled losses: regularisers, `add_loss`.
    """

    divisors: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, tuple[Any, Any, Any, Any]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    added: bool = False


@contextlib.contextmanager
def weighed_losses(model: Any, share: Any = 1.0, totals: dict[int, Any] | None = None) -> Iterator[Measured]:
    """While this is open, `model.compute_loss` returns a micro-batch's part of the large batch's loss, over `share`.

    Yields:
        A `Measured` that fills as the losses are computed.
    """
    measured = Measured()
    compiled = compiled_losses(model)
    if compiled is None:
        yield measured
        return
    with replaced_losses(
        compiled,
        lambda index, loss: _WeighedLoss(index, loss, measured, share, totals),
        lambda index, tracker: _SilentTracker(index, tracker, measured),
    ):
        yield measured


def update_trackers(model: Any, values: list[Any], rows: Any) -> None:
    """Tell the trackers of the single losses their values over the whole batch, as plain `fit` does once per update."""
    if compiled_losses(model) is not None:
        for tracker, value in zip(compiled_losses(model).metrics, values):
            tracker.update_state(value, sample_weight=rows)


class _SilentTracker:
    """Stands in for the tracker of one loss, and keeps what it is told to itself."""

    def __init__(self, index: int, tracker: Any, measured: Measured) -> None:
        self.index, self.tracker, self.measured = index, tracker, measured

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.measured.values[self.index] = value


class _WeighedLoss:
    """Stands in for one loss of `compile`."""

    def __init__(self, index: int, loss: Any, measured: Measured, share: Any, totals: dict[int, Any] | None) -> None:
        self.index, self.loss, self.measured, self.share, self.totals = index, loss, measured, share, totals

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.measured.calls[self.index] = (self.loss, y_true, y_pred, sample_weight)
        total = None if self.totals is None else self.totals.get(self.index)
        value, count = weighed(self.loss, y_true, y_pred, sample_weight, self.share, total)
        if count is not None:
            self.measured.divisors[self.index] = count
        return value


def weighed(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None, share: Any = 1.0, total: Any = None
) -> tuple[Any, Any]:
    """A micro-batch's part of the large batch's loss, over `share`; and `D_ij`, or None where it isn't counted."""
    in_mask = keras_mask(y_pred)
    values: list[Any] = []
    with _recorded(loss, values):
        value = loss(y_true, y_pred, sample_weight)
    if not values or len(getattr(values[-1], "shape", ())) == 0:  # a number of Python's has none
        return value, None  # a scalar that the loss reduced by itself: a mean over rows, or it is refused
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction in ("sum", "none", None):
        return value / ops.cast(share, value.dtype), None
    count = _count(reduction, values[-1], in_mask, sample_weight)
    if count is None:
        return value, None
    count = ops.cast(ops.stop_gradient(count), value.dtype)
    reduced_by_keras = type(loss).__call__ is keras.losses.Loss.__call__
    exactly = reduction == "mean_with_sample_weight" and sample_weight is not None and reduced_by_keras
    if total is None and not exactly:
        return value, count
    total = (
        ops.where(count != 0, count, ops.ones_like(count)) / share if total is None else ops.cast(total, value.dtype)
    )
    # `ops.divide_no_nan` would fall back to float32 on PyTorch.
    divisor = ops.where(total != 0, total, ops.ones_like(total)) * ops.cast(share, value.dtype)
    if not exactly:
        return value * (count / divisor), count
    # The sum itself: weights of both signs may cancel in a micro-batch, and its mean is 0 then.
    summed = reduce_weighted_values(values[-1], sample_weight, _joint(in_mask, values[-1]), "sum", loss.dtype)
    part = scale_loss_for_distribution(summed / divisor)
    return ops.where(total != 0, part, ops.zeros_like(part)), count


@contextlib.contextmanager
def _recorded(loss: Any, values: list[Any]) -> Iterator[None]:
    """While this is open, what `loss.call` returns before it is reduced is appended to `values`."""
    call, own = loss.call, loss.__dict__.get("call")

    def recording(y_true: Any, y_pred: Any) -> Any:
        values.append(call(y_true, y_pred))
        return values[-1]

    loss.call = recording
    try:
        yield
    finally:
        del loss.call
        if own is not None:
            loss.call = own


def _count(reduction: str, values: Any, in_mask: Any, sample_weight: Any) -> Any:
    """`D_ij` up to a factor that is the same for all micro-batches; None where it is the number of rows.

    Mirrors `keras.losses.Loss.__call__` and `reduce_weighted_values`.
    """
    mask = _joint(in_mask, values)
    dtype = keras.backend.standardize_dtype(values.dtype)
    if reduction == "mean_with_sample_weight":
        if sample_weight is None:
            return None if mask is None else ops.sum(ops.cast(mask, dtype))
        sample_weight = ops.cast(sample_weight, dtype)
        if mask is not None:
            mask, sample_weight = squeeze_or_expand_to_same_rank(ops.cast(mask, dtype), sample_weight)
            sample_weight = sample_weight * mask
        return ops.sum(sample_weight)
    return None if mask is None else ops.sum(ops.cast(mask, dtype))


def _joint(in_mask: Any, values: Any) -> Any:
    """The mask of a loss: that of the predictions, and that of what `call` returned."""
    out_mask = keras_mask(values)
    if in_mask is not None and out_mask is not None:
        return ops.logical_and(in_mask, out_mask)
    return in_mask if in_mask is not None else out_mask


def divisors_of(
    model: Any,
    state: Sequence[Any],
    x: Any,
    y: Any,
    sample_weight: Any,
    share: Any = 1.0,
    totals: dict[int, Any] | None = None,
) -> tuple[list[Any], Measured, Any, Any]:
    """One forward pass without side effects, for what it tells: masks are known only after it."""
    trainable, non_trainable, metrics = state
    kwargs = {"training": True} if takes_training(model) else {}
    y_pred, non_trainable, losses = model.stateless_call(trainable, non_trainable, x, return_losses=True, **kwargs)
    # As JAXTrainer does it: `add_loss` terms would be lost with the stateless scope.
    set_added_losses(model, losses)
    try:
        with weighed_losses(model, share, totals) as measured:
            loss, _ = model.stateless_compute_loss(
                trainable, non_trainable, metrics, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
    finally:
        set_added_losses(model, [])
    measured.added = bool(losses)
    return non_trainable, measured, y_pred, loss
