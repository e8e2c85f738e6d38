"""`micro_batch_size="auto"`: a few sizes are compiled, those that fit are timed on zeros, and the fastest is taken."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from gradaccum.core.sizes import MARGIN, MemoryLine, format_bytes, free_host_memory
from gradaccum.jax.batch import stated_bytes
from gradaccum.jax.train_step.call import Call

logger = logging.getLogger("gradaccum")

_STEP = 4
"""Sizes are tried in steps of this factor, and the double and the half of the best one after that."""
_SMALLEST_PART = 64
"""The first size is this part of the rows."""
_WORSE = 1.05
"""A size that takes so much longer than the best one is slower, not noise."""
_QUICK = 0.2
"""Seconds below which an update is timed three times."""


class Trial(NamedTuple):
    """A size, compiled for the whole batch."""

    bytes: float
    """Memory that loss and gradients take, as XLA states it."""
    seconds: Callable[[], float]
    """How long they take, on zeros."""


class AutoSize:
    """The sizes of one `value_and_grad`, one for each set of shapes."""

    def __init__(self, limit: int | None, compute: Callable[[Call, int], Any]) -> None:
        self.limit = limit
        self._compute = compute
        self._known: dict[Any, int] = {}

    def of(self, call: Call) -> int:
        """The size for this call: rows of all devices together."""
        key = call.shapes()
        if key not in self._known:
            self._known[key] = self._found(call)
        return self._known[key]

    def _found(self, call: Call) -> int:
        leaves, places, _ = call.leaves()
        # A device is measured by itself, with the rows that it has.
        devices = call.batch.devices if call.batch.rows % call.batch.devices == 0 else 1
        rows = call.batch.rows // devices
        arrays = call.arrays()
        kinds = [_on_one_device(leaves[number], places[number], devices) for number in arrays]

        def trial(size: int) -> Trial:
            def run(*values: Any) -> Any:
                given = [_key_again(leaves[number], value) for number, value in zip(arrays, values)]
                args, kwargs = call.filled(arrays, given)
                return self._compute(Call(call.options, args, kwargs), size)

            return _compiled(run, kinds)

        arguments = float(sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds))
        limit = _free(arguments) if self.limit is None else float(self.limit)
        size, trials, seconds = fastest(rows, trial, limit)
        logger.info(
            "micro_batch_size='auto': %d of %d rows. Loss and gradients take %s of %s%s, as XLA states it. "
            "Milliseconds per update by size: %s.",
            size * devices, call.batch.rows, format_bytes(trials[size].bytes), format_bytes(limit),
            f" on each of {devices} devices" if devices > 1 else "",
            ", ".join(f"{each * devices}: {1e3 * seconds[each]:.3g}" for each in sorted(seconds)),
        )  # fmt: skip
        return size * devices


def fastest(
    rows: int, trial_of: Callable[[int], Trial], limit: float
) -> tuple[int, dict[int, Trial], dict[int, float]]:
    """The fastest size whose memory is within the limit, with what was compiled and timed to find it.

    Example:
        >>> trial_of = lambda size: Trial(100.0 * size, lambda: 1.0 + 64.0 / size)
        >>> size, trials, _ = fastest(256, trial_of, limit=10_000)
        >>> size, sorted(trials)
        (100, [4, 16, 64, 100])
    """
    trials: dict[int, Trial] = {}
    seconds: dict[int, float] = {}
    line = MemoryLine()

    def fits(size: int) -> bool:
        if size not in trials:
            trials[size] = trial_of(size)
            line.add(size, trials[size].bytes)
            if trials[size].bytes <= limit:
                seconds[size] = trials[size].seconds()
        return size in seconds

    size = max(rows // _SMALLEST_PART, 1)
    while not fits(size):
        if size == 1:
            raise ValueError(
                f'micro_batch_size="auto": micro-batches of one row take {format_bytes(trials[1].bytes)} with the '
                f"parameters, the batch and the gradients, as XLA states it; the limit is {format_bytes(limit)}. Raise "
                "`memory_limit`."
            )
        size = max(size // _STEP, 1)
    while size < rows:
        following = min(_STEP * size, rows)
        if line.predict(following) > limit:
            following = min(following, line.largest(limit) or 1)
        if following <= size or not fits(following):
            break
        size = following
        if seconds[size] > _WORSE * min(seconds.values()):
            break
    best = min(seconds, key=seconds.__getitem__)
    for near in (best // 2, 2 * best):
        between = min(trials) < near < max(seconds)
        new = all(max(near, size) > 1.5 * min(near, size) for size in trials)
        if between and new and line.predict(near) <= limit:
            fits(near)
    return min(seconds, key=seconds.__getitem__), trials, seconds


def _on_one_device(leaf: Any, axis: int | None, devices: int) -> Any:
    """The shape and dtype of one device's part of an array; of a key's numbers, as there are no zeros of its type."""
    shape = list(leaf.shape)
    if axis is not None:
        shape[axis] //= devices
    kind = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
    return jax.eval_shape(jax.random.key_data, kind) if _is_typed_key(leaf) else kind


def _key_again(leaf: Any, value: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_typed_key(leaf) else value


def _is_typed_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _compiled(run: Callable[..., Any], kinds: list[Any]) -> Trial:
    traced = jax.make_jaxpr(run)(*kinds)
    if any(type(effect).__name__ == "NamedAxisEffect" for effect in traced.effects):
        raise ValueError(
            'micro_batch_size="auto" compiles loss_fn alone, but loss_fn uses a named axis of a shard_map or vmap '
            "around it. Give a number."
        )
    # What the loss function takes from around it may be traced itself: here it is one more argument.
    consts = [const if hasattr(const, "shape") else jnp.asarray(const) for const in traced.consts]
    around = [_on_one_device(const, None, 1) for const in consts]

    def of(numbers: list[Any], values: list[Any]) -> Any:
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, [_key_again(*pair) for pair in zip(consts, numbers)]))(*values)

    compiled = jax.jit(of).lower(around, kinds).compile()

    def seconds() -> float:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):
            arguments = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), (around, kinds))
            taken: list[float] = []
            while len(taken) < (4 if taken[1:] and taken[1] < _QUICK else 2):
                start = time.perf_counter()
                jax.block_until_ready(compiled(*arguments))
                taken.append(time.perf_counter() - start)
        return min(taken[1:])  # the first run is slow

    return Trial(float(stated_bytes(compiled)), seconds)


def _free(arguments: float) -> float:
    """Bytes that the device has left; the arguments are there already."""
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else free_host_memory()
    return math.inf if free is None else (1 - MARGIN) * free + arguments
