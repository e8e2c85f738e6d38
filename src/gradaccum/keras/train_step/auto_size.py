"""`micro_batch_size="auto"` where the update is compiled as a whole: a few sizes are measured beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.sizes import MARGIN, WORSE, fastest_size, process_memory, seconds_of
from gradaccum.keras import backends
from gradaccum.keras.backends.base import has_rows, unpack
from gradaccum.keras.loss import divisors_of

logger = logging.getLogger("gradaccum")

_UNKNOWN_ROWS, _UNKNOWN_DIMENSION = 4096, 128
"""Rows to try at most where TensorFlow doesn't know the batch's while it traces, and what stands in for another
dimension that is not known, such as the length of sequences."""
_OUT_OF_MEMORY = "resource_exhausted", "resourceexhausted", "memory", "oom"


def size_for_memory(model: Any, data: Any, rows: int | None) -> int:
    """The rows with which micro-batches are about the fastest, of those that fit into memory.

    A few sizes are tried, each with a forward and backward pass over zeros in the shapes of `data`, compiled as the
    model is. What they need is what XLA states on JAX, and what the process took on TensorFlow.
    """
    most, free = _UNKNOWN_ROWS if rows is None else rows, backends.running().free_memory()
    limit = float("inf") if free is None else (1 - MARGIN) * free
    base = process_memory()["VmHWM"]  # the most bytes ever in use

    def trial(size: int) -> tuple[float, float | None]:
        seconds = needed = None
        try:
            run, needed = _gradient(model, data, size)
            if needed is None or needed <= limit or size == 1:
                seconds = seconds_of(run) * most / size
        except Exception as error:
            said = f"{type(error).__name__} {error}".lower()
            if size == 1 or all(sign not in said for sign in _OUT_OF_MEMORY):
                raise
        return process_memory()["VmHWM"] - base if needed is None else needed, seconds

    _, _, seconds = fastest_size(most, trial, limit)
    # What an update does once per micro-batch isn't measured.
    best = max(size for size, taken in seconds.items() if taken <= WORSE * min(seconds.values()))
    logger.info("micro_batch_size='auto': %d of %s rows.", best, "any number of" if rows is None else rows)
    return best


def _gradient(model: Any, data: Any, size: int) -> tuple[Callable[[], Any], float | None]:
    """One gradient of a micro-batch, ready to run, and the bytes that it needs, where the compiler says."""
    backend = backends.running()

    def zeros(leaf: Any) -> Any:
        if leaf is None:
            return None
        shape = [size, *leaf.shape[1:]] if has_rows(leaf) else []
        known = [_UNKNOWN_DIMENSION if number is None else number for number in shape]
        return ops.convert_to_tensor(np.zeros(known, keras.backend.standardize_dtype(leaf.dtype)))

    def gradients(state: Any, batch: Any) -> Any:
        def loss_of(values: Any) -> Any:
            return ops.sum(divisors_of(model, (values, *state[1:]), *unpack(batch))[1]), None

        return backend.value_and_gradients(loss_of, state[0])

    variables = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
    state = [[ops.zeros(v.shape, v.dtype) for v in part] for part in variables]
    return backend.prepared(gradients, (state, tree.map_structure(zeros, data)), model)
