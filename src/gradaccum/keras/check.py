"""Prove it: the gradient of the large batch against that of micro-batches, and the culprit's name where they differ."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.equivalence import Cause, Equivalence, limits_of
from gradaccum.core.proof import Comparison, differences_between, worst
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import rows_of
from gradaccum.keras.batch_norm import BatchNorm
from gradaccum.keras.equivalence import StepRunner, find_causes, precision_of
from gradaccum.keras.train_step import MicroBatchedStep, ragged_size
from gradaccum.schedule import checked_count

__all__ = ["check_equivalence"]


def check_equivalence(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    micro_batch_size: int | None = None,
    batch_norm: BatchNorm | None = None,
    tolerance: float | None = None,
) -> Equivalence:
    """Test whether micro-batches give the large batch's gradient, and name the cause if they don't.

    It compares loss, gradients and moved variables of the batch at once with those of several partitions of its rows,
    ragged ones among them. The error of a tensor is `max|a - b| / max|b|`. Random draws (dropout, sampling) are the
    same for each row, and the model doesn't change. It is evidence for this model and batch, not a proof; a model in
    float64 (`keras.config.set_dtype_policy("float64")`) gives the sharpest.

    Args:
        model: A compiled model.
        x, y, sample_weight: One large batch, as for `model.train_on_batch`; 2 rows or more, better 8.
        micro_batch_size: Rows of the micro-batches in one of the partitions. Default: that of `micro_batched`, if the
            model went through it, else ragged ones only.
        batch_norm: As for `micro_batched`. `"frozen"` checks the model with its BatchNormalization frozen.
        tolerance: The largest relative error that counts as rounding; None: by the dtype the model computes in.

    Returns:
        A record that prints, with `.ok`, `.max_error`, `.causes`, `.save()` and `.raise_if_different()`.

    Raises:
        TypeError: `model` is no `keras.Model`.
        ValueError: The model is not compiled, its arrays disagree about the rows, there is but one row, or the large
            batch's own loss is not finite.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> x, y = np.random.default_rng(0).normal(size=(16, 3)), np.ones((16, 1))
        >>> result = check_equivalence(model, x, y, micro_batch_size=4)
        >>> result.ok, result.causes[0].where
        (False, 'bn')
        >>> check_equivalence(model, x, y, batch_norm="frozen").ok
        True
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r} of type {type(model).__name__}.")
    if not model.compiled:
        raise ValueError("`model` must be compiled: its losses are what is checked. Call model.compile(...) first.")
    step = vars(model).get("train_step")
    if isinstance(step, MicroBatchedStep):
        if micro_batch_size is None and step.micro_batch_size != "auto":
            micro_batch_size = step.micro_batch_size
        batch_norm = batch_norm or step.batch_norm
    if micro_batch_size is not None:
        checked_count(micro_batch_size, "micro_batch_size")
    data = tree.map_structure(
        lambda leaf: leaf if leaf is None or ops.is_tensor(leaf) else ops.convert_to_tensor(leaf), (x, y, sample_weight)
    )
    rows = rows_of(data)
    if rows is None or rows < 2:
        raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {rows}.")
    with backends.running().random_kept():
        return _checked(model, data, rows, "frozen" if batch_norm == "frozen" else "micro", micro_batch_size, tolerance)


def _checked(
    model: Any, data: Any, rows: int, batch_norm: BatchNorm, micro_batch_size: int | None, tolerance: float | None
) -> Equivalence:
    private.build_symbolically(model, data)
    step, precision = MicroBatchedStep(model, rows, batch_norm, verify=False), precision_of(model)
    allowed = rounding(precision, _device()) if tolerance is None else tolerance
    runner = StepRunner(step, data, batch_norm, allowed)
    order, size = np.random.default_rng(0).permutation(rows).tolist(), ragged_size(rows) or 1
    sizes = [*([] if micro_batch_size is None or micro_batch_size >= rows else [micro_batch_size]), size]
    in_order = Comparison(runner, range(rows), [(range(rows), even_sizes(rows, size)) for size in sizes], "raise")
    shuffled = Comparison(runner, order, [(order, even_sizes(rows, size))], "raise")
    loss = in_order.large.losses["loss"]
    if not np.isfinite(loss).all():
        raise ValueError(f"The large batch's own loss is {loss}: there is nothing to compare.")
    # A moved variable may heed the order of rows, such as the last row's value.
    moved = [d for d in differences_between(runner, shuffled.large, in_order.large) if d.part != "buffer"]
    found = worst([*(in_order.differences() or []), *(shuffled.differences() or []), *moved])
    compared = [*in_order.compared, *shuffled.compared]
    largest = max(compared, key=lambda one: one.error)
    failing = largest.way if not largest.error <= allowed else compared[-1].way
    causes: list[Cause] = []
    if any(not error <= allowed for error in (largest.error, *(d.error for d in moved))):
        parts = np.split(np.asarray(failing[0]), np.cumsum(failing[1])[:-1])
        trained, moving, _, metrics = step.state()
        causes = find_causes(model, (trained, moving, metrics), data, parts, found, allowed, batch_norm)
    notes = {
        "Random numbers were held: whatever is drawn, as by dropout, was the same for each row.": runner.draws.held,
        "Random numbers are drawn that don't come from keras.random: they can't be held, and differ from one partition "
        "to the other.": runner.draws.raw,
    }
    return Equivalence(
        tuple(found),
        allowed,
        tuple(causes),
        rows=rows,
        partitions=tuple(tuple(one.way[1]) for one in compared),
        notes=(*(note for note, holds in notes.items() if holds), *limits_of(rows)),
        precision=precision,
        device=_device(),
    )


def _device() -> str:
    backend = keras.backend.backend()
    if backend == "torch":
        return str(private.torch_device()).partition(":")[0]
    if backend == "jax":
        import jax

        return jax.default_backend()
    import tensorflow as tf

    return "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
