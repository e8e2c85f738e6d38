"""`micro_batch_size="auto"` where the update is compiled as a whole: the fastest that fits, measured beforehand."""

from __future__ import annotations

import logging
import timeit
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.sizes import MARGIN, MemoryLine, free_host_memory, process_memory
from gradaccum.keras import backends
from gradaccum.keras.backends.base import has_rows, unpack
from gradaccum.keras.loss import divisors_of

__all__ = ["fastest_size"]

_UNKNOWN_ROWS = 4096
"""Rows to try at most where TensorFlow doesn't know the batch's while it traces."""
_UNKNOWN_DIMENSION = 128
"""What stands in for another dimension that is not known, such as the length of sequences."""
_WORSE = 1.05
"""After two sizes that are so much slower per row than the best, larger ones aren't tried."""

_log = logging.getLogger("gradaccum")


def fastest_size(model: Any, data: Any, rows: int | None) -> int:
    """The rows with which a micro-batch is fastest per row, of those that fit into memory.

    Powers of two are tried from small to large, each with a forward and backward pass over zeros in the shapes of
    `data`, compiled as the model is. A size is only tried when the memory of the smaller ones, an affine function of
    the rows, says that it fits: what XLA states on JAX, and what the process took on TensorFlow.
    """
    most = _UNKNOWN_ROWS if rows is None else rows
    size, backend = min(max(1, most // 64), 8), backends.running()
    free = backend.free_memory(free_host_memory)
    line, limit = MemoryLine(), float("inf") if free is None else (1 - MARGIN) * free
    base = process_memory()["VmHWM"]  # the most bytes ever in use
    seconds: dict[int, float] = {}
    while True:
        try:
            run, needed = _trial(model, data, size)
            if needed is not None and needed > limit:
                break
            run()
            seconds[size] = min(timeit.repeat(run, number=1, repeat=3)) / size
        except Exception as error:
            text = f"{type(error).__name__} {error}".lower()
            if seconds and any(sign in text for sign in ("resource_exhausted", "resourceexhausted", "memory", "oom")):
                break
            raise
        line.add(size, process_memory()["VmHWM"] - base if needed is None else needed)
        best = min(seconds, key=seconds.__getitem__)
        slower = [other for other in seconds if other > best and seconds[other] > _WORSE * seconds[best]]
        size, tried = min(2 * size, most), size
        if size == tried or len(slower) >= 2 or line.predict(size) > limit:
            break
    best = min(seconds, key=seconds.__getitem__, default=1)
    _log.info("micro_batch_size='auto': %d of %s rows.", best, "any number of" if rows is None else rows)
    return best


def _trial(model: Any, data: Any, size: int) -> tuple[Callable[[], Any], float | None]:
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
