"""`micro_batch_size="auto"`: a few sizes are compiled, those that fit are timed on zeros, and the fastest is taken."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from gradaccum.core.sizes import MARGIN, fastest_size, format_bytes, seconds_of
from gradaccum.jax.batch import stated_bytes
from gradaccum.jax.train_step.call import Call
from gradaccum.on_jax import free_memory

logger = logging.getLogger("gradaccum")


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

        def trial(size: int) -> tuple[float, float | None]:
            def run(*values: Any) -> Any:
                given = [_key_again(leaves[number], value) for number, value in zip(arrays, values)]
                args, kwargs = call.filled(arrays, given)
                return self._compute(Call(call.options, args, kwargs), size)

            return _measured(run, kinds, limit)

        there = float(sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds))
        free = free_memory() if self.limit is None else None
        limit = float(self.limit or math.inf) if free is None else (1 - MARGIN) * free + there
        size, stated, seconds = fastest_size(rows, trial, limit)
        logger.info(
            "micro_batch_size='auto': %d of %d rows. Loss and gradients take %s of %s%s, as XLA states it. "
            "Milliseconds per update by size: %s.",
            size * devices, call.batch.rows, format_bytes(stated[size]), format_bytes(limit),
            f" on each of {devices} devices" if devices > 1 else "",
            ", ".join(f"{each * devices}: {1e3 * seconds[each]:.3g}" for each in sorted(seconds)),
        )  # fmt: skip
        return size * devices


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


def _measured(run: Callable[..., Any], kinds: list[Any], limit: float) -> tuple[float, float | None]:
    """The bytes that XLA states, and the seconds, on zeros; None where it states more than the limit."""
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

    stated = float(stated_bytes(compiled))
    if stated > limit:
        return stated, None
    with jax.ensure_compile_time_eval(), jax.debug_nans(False):
        arguments = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), (around, kinds))
        return stated, seconds_of(lambda: jax.block_until_ready(compiled(*arguments)))
