"""`check_equivalence`: a compiled model's large batch against its micro-batches, and what makes them differ."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops, tree

from gradaccum.core.causes import nondeterminism_cause
from gradaccum.core.equivalence import Equivalence
from gradaccum.core.proof import Comparison
from gradaccum.core.ways import even_ways
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import rows_of
from gradaccum.keras.batch_norm import BatchNorm
from gradaccum.keras.proof import StepRunner, find_causes
from gradaccum.keras.train_step import MicroBatchedStep
from gradaccum.schedule import checked_count


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
    same for each row, and the model doesn't change. The result is evidence for this model and batch, not a proof. It is
    sharpest in float64 (`keras.config.set_dtype_policy("float64")`).

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
        raise ValueError("`model` must be compiled, because its losses are checked. Call model.compile(...) first.")
    step = vars(model).get("train_step")
    if isinstance(step, MicroBatchedStep):
        if micro_batch_size is None and step.micro_batch_size != "auto":
            micro_batch_size = step.micro_batch_size
        batch_norm = batch_norm or step.batch_norm
    if micro_batch_size is not None:
        checked_count(micro_batch_size, "micro_batch_size")
    x, y, sample_weight = tree.map_structure(
        lambda leaf: leaf if leaf is None or ops.is_tensor(leaf) else ops.convert_to_tensor(leaf), (x, y, sample_weight)
    )
    rows = rows_of((x, y, sample_weight))
    if rows is None or rows < 2:
        raise ValueError(f"The batch must have at least 2 rows to be split. Received: {rows}. Pass 8 or more.")
    kind: BatchNorm = "frozen" if batch_norm == "frozen" else "micro"
    with backends.running().at_once():
        return _checked(model, (x, y, sample_weight), rows, kind, micro_batch_size, tolerance)


def _checked(
    model: Any, data: Any, rows: int, batch_norm: BatchNorm, micro_batch_size: int | None, tolerance: float | None
) -> Equivalence:
    private.build_symbolically(model, data)
    step, ways = MicroBatchedStep(model, rows, batch_norm, verify=False), even_ways(rows, micro_batch_size)
    step.trial(max(ways[0][1]), batch_norm).check_states(rows)
    runner = StepRunner(step, data, rows, batch_norm, tolerance)
    comparison = Comparison(runner, ways, "differs")
    comparison.check_loss()
    found, causes = comparison.judged() or [], comparison.raised()
    if comparison.unrepeated and not runner.draws.raw:
        causes = [nondeterminism_cause(comparison.unrepeated, "Python numbers that calls of a layer change")]
    for way in comparison.failing(runner.tolerance)[:1] if not causes else ():
        causes = find_causes(runner, way, found)
    notes = {
        "Random numbers, such as those of dropout, were the same for each row.": runner.draws.held,
        "The model draws random numbers that can't be made the same for each row, so they differ between "
        "partitions.": runner.draws.raw,
    }
    return comparison.record(found, causes, runner.tolerance, [note for note, holds in notes.items() if holds])
