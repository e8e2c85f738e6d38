"""Accumulation under TensorFlow, in graphs and eagerly, on one device and on the replicas of a tf.distribute strategy.

Each replica keeps a sum of its own. All that decides happens outside of the replicas, where `tf.cond` may hold a
branch that synchronises them: so there is one reduction per window, the inner optimizer's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from gradaccum.keras import private
from gradaccum.keras.optimizer.window import Counts, Window, is_overwritten, rescaled

__all__ = ["accumulate", "beside", "close", "host", "place_of", "put", "replica", "total"]


def accumulate(window: Window, gradients: list[Any], rows: Any) -> None:
    """Add a micro-batch's gradients to the window, and close it if it is full."""
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied by a replica. Call strategy.run(train_step), and apply them in train_step."
        )
    rows = None if rows is None else tf.cast(rows, "int64")
    if not tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, gradients, rows: _accumulate(window, gradients, rows, strategy),
            args=(gradients, rows),
        )
    else:
        _accumulate(window, gradients, rows, None)


def close(window: Window) -> None:
    """Close the window with what it holds, between training steps."""
    strategy = window.place
    untouched = _untouched(window)
    if strategy.num_replicas_in_sync > 1:
        with strategy.scope():
            # In a graph: run eagerly, replicas wait for each other's reductions in an order that can lock.
            tf.function(lambda: _close(window, _read(window), untouched, strategy))()
    else:
        _close(window, _read(window), untouched, None)


def _accumulate(window: Any, gradients: Any, rows: Any, strategy: Any) -> None:
    """`gradients` and `rows` are one replica's for `strategy=None`, else those of every replica."""
    replicas = strategy.num_replicas_in_sync if strategy else 1
    all_rows = strategy.reduce("SUM", rows, axis=None) if strategy and rows is not None else rows
    counts, weight, rescale, closes = window.rule.add(_read(window), all_rows)

    def add(total: Any, gradient: Any, rows: Any, variable: Any) -> None:
        gradient = tf.cast(gradient, total.dtype)
        if is_overwritten(variable):
            total.assign(tf.maximum(total, gradient))
            return
        # Keras divides each replica's loss by their number; where rows are known it shall count by its rows.
        gradient = _times(gradient, tf.cast(weight if rows is None else rows * replicas, total.dtype))
        if isinstance(gradient, tf.IndexedSlices):
            total.scatter_add(gradient)
        else:
            total.assign_add(gradient)

    def scale_sums() -> None:
        for total, variable in zip(window.sums, window.variables):
            if strategy:
                strategy.extended.update(total.value, _scale, args=(variable, rescale), group=False)
            else:
                _scale(total.value, variable, rescale)

    if rescale is not None:
        tf.cond(tf.cast(rescale, "int64") == 1, lambda: None, scale_sums)
    for total, gradient, variable in zip(window.sums, gradients, window.variables):
        if gradient is None:
            continue
        if strategy:
            strategy.extended.update(total.value, add, args=(gradient, rows, variable), group=False)
        else:
            add(total.value, gradient, rows, variable)
    absent = [gradient is None for gradient in gradients]
    present = tf.constant([not none for none in absent], window.touched.value.dtype)
    window.touched.value.assign(tf.maximum(window.touched.value, present))
    tf.cond(
        closes,
        lambda: _close(window, counts, absent if tf.inside_function() else _untouched(window), strategy),
        lambda: _write(window, counts),
    )


def _close(window: Any, counts: Counts, absent: list[bool], strategy: Any) -> None:
    inner, variables = window.inner, window.variables
    touched = window.touched.value

    def in_each_replica(function: Any) -> None:
        if strategy:
            strategy.extended.call_for_each_replica(function)
        else:
            function()

    def apply(leave_out: list[bool]) -> None:
        def in_replica() -> None:
            means = window.means([total.value for total in window.sums], counts.weight)
            inner.apply([None if none else mean for mean, none in zip(means, leave_out)], variables)

        if not all(leave_out):
            in_each_replica(in_replica)

    before = tf.identity(inner.iterations)
    if any(absent) and tf.inside_function():
        # Whether an earlier micro-batch of the window had a gradient for one of them is known only at run time.
        tf.cond(
            tf.reduce_any(tf.boolean_mask(touched, absent) > 0),
            lambda: apply([False] * len(absent)),
            lambda: apply(absent),
        )
    else:
        apply(absent)
    for total in window.sums:
        total.value.assign(tf.zeros(total.shape, total.value.dtype))
    touched.assign(tf.zeros(touched.shape, touched.dtype))
    updated = tf.cast(inner.iterations != before, "int64") if window.may_skip else 1
    _write(window, window.rule.closed(counts, updated))


def _scale(total: Any, variable: Any, rescale: Any) -> None:
    total.assign(rescaled(total, variable, rescale))


def _untouched(window: Window) -> list[bool]:
    """Which variables have had no gradient in this window."""
    return [not touched for touched in window.touched.value.numpy().tolist()]


def _times(gradient: Any, factor: Any) -> Any:
    # A replica without rows has a NaN for its mean, and counts for nothing.
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, factor)


def _read(window: Window) -> Counts:
    return Counts(*tf.unstack(tf.convert_to_tensor(window.counts.value)))


def _write(window: Window, counts: Counts) -> None:
    variable = window.counts.value
    variable.assign(tf.stack([tf.cast(count, variable.dtype) for count in counts]))


def replica() -> Any:
    """Which replica's training step this is."""
    context = tf.distribute.get_replica_context()
    replica = getattr(context, "replica_id_in_sync_group", 0)
    return replica if isinstance(replica, int) else 0


def place_of(optimizer: Any) -> Any:
    """The strategy whose replicas have a sum each."""
    return private.strategy_of(optimizer)


host = contextlib.nullcontext


def beside(place: Any, variable: Any) -> Any:
    """Where the variables that go with this one are made."""
    own = variable.value if isinstance(variable, keras.Variable) else variable
    return place.extended.colocate_vars_with(own)


def total(variable: Any) -> Any:
    """A sum over all replicas."""
    return tf.add_n([tf.convert_to_tensor(part) for part in _parts(variable)])


def put(variable: Any, value: Any) -> None:
    """Let the replicas' sums add up to this."""
    first, *others = _parts(variable)
    first.assign(value)
    for part in others:
        part.assign(tf.zeros(part.shape, part.dtype))


def _parts(variable: Any) -> list[Any]:
    return list(getattr(variable.value, "values", [variable.value]))
