"""`micro_batch_size="auto"` where the update is compiled as a whole: the fastest that fits, measured beforehand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.sizes import MARGIN, MemoryLine, free_host_memory, process_memory
from gradaccum.keras.backends.rows import has_rows, unpack
from gradaccum.keras.loss import divisors_of, value_and_gradients

__all__ = ["fastest_size"]

_UNKNOWN_ROWS = 4096
"""Rows to try at most where TensorFlow doesn't know the batch's while it traces."""
_UNKNOWN_DIMENSION = 128
"""What stands in for another dimension that is not known, such as the length of sequences."""
_WORSE = 1.05
"""After two sizes that are so much slower per row than the best, larger ones aren't tried."""

_log = logging.getLogger("gradaccum")


@dataclass
class _Trial:
    """One gradient of a micro-batch, ready to run."""

    run: Callable[[], Any]
    bytes: float | None
    """What it needs, where the compiler says."""


def fastest_size(model: Any, data: Any, rows: int | None) -> int:
    """The rows with which a micro-batch is fastest per row, of those that fit into memory.

    Powers of two are tried from small to large, each with a forward and backward pass over zeros in the shapes of
    `data`, compiled as the model is. A size is only tried when the memory of the smaller ones, an affine function of
    the rows, says that it fits: what XLA states on JAX, and what the process took on TensorFlow.
    """
    most = _UNKNOWN_ROWS if rows is None else rows
    size = min(max(1, most // 64), 8)
    line, limit = MemoryLine(), _free_memory()
    base = _in_use()
    seconds: dict[int, float] = {}
    while True:
        try:
            trial = _trial(model, data, size)
            if trial.bytes is None or limit is None or trial.bytes <= (1 - MARGIN) * limit:
                trial.run()
                seconds[size] = min(_seconds(trial.run) for _ in range(3)) / size
        except Exception as error:
            if seconds and _is_out_of_memory(error):
                break
            raise
        if size not in seconds:
            break
        line.add(size, trial.bytes if trial.bytes is not None else _in_use() - base)
        best = min(seconds, key=seconds.__getitem__)
        slower = [other for other in seconds if other > best and seconds[other] > _WORSE * seconds[best]]
        following = min(2 * size, most)
        fits = limit is None or line.predict(following) <= (1 - MARGIN) * limit
        if following == size or len(slower) >= 2 or not fits:
            break
        size = following
    best = min(seconds, key=seconds.__getitem__, default=1)
    _log.info("micro_batch_size='auto': %d of %s rows.", best, "any number of" if rows is None else rows)
    return best


def _trial(model: Any, data: Any, size: int) -> _Trial:
    variables = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
    state = [[np.zeros(tuple(v.shape), v.dtype) for v in part] for part in variables]
    batch = tree.map_structure(lambda leaf: _zeros(leaf, size), data)

    def gradients(state: Any, batch: Any) -> Any:
        def loss_of(values: Any) -> Any:
            return ops.sum(divisors_of(model, (values, *state[1:]), *unpack(batch))[3])

        return value_and_gradients(loss_of, state[0])

    if keras.backend.backend() == "jax":
        import jax

        compiled = jax.jit(gradients).lower(state, batch).compile()
        analysis = compiled.memory_analysis()
        needs = None if analysis is None else float(analysis.temp_size_in_bytes)
        return _Trial(lambda: jax.block_until_ready(compiled(state, batch)), needs)
    state, batch = tree.map_structure(
        lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), (state, batch)
    )
    run = gradients
    if keras.backend.backend() == "tensorflow" and not model.run_eagerly:
        import tensorflow as tf

        run = tf.function(gradients, jit_compile=model.jit_compile)
    return _Trial(lambda: ops.convert_to_numpy(run(state, batch)[0]), None)


def _zeros(leaf: Any, size: int) -> Any:
    if not has_rows(leaf):
        return None if leaf is None else np.zeros((), keras.backend.standardize_dtype(leaf.dtype))
    shape = [_UNKNOWN_DIMENSION if number is None else number for number in leaf.shape[1:]]
    return np.zeros((size, *shape), keras.backend.standardize_dtype(leaf.dtype))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _free_memory() -> float | None:
    """Bytes that the device has left."""
    if keras.backend.backend() == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats["bytes_in_use"]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if tf.config.list_logical_devices("GPU"):
            return None  # not told: the first size that runs out of memory ends the search
    return free_host_memory()


def _in_use() -> float:
    """The most bytes ever in use."""
    return process_memory()["VmHWM"]


def _is_out_of_memory(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(sign in text for sign in ("resource_exhausted", "resourceexhausted", "memory", "oom"))
