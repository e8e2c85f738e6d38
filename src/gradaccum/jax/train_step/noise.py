"""What the noise scale is estimated from: the norms of the first micro-batch's gradient and of the whole batch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.core.noise import Norms
from gradaccum.jax.batch import Group, as_varying, squared_norm
from gradaccum.jax.train_step.call import Call

__all__ = ["First", "NoiseMeter", "norms_of_one"]


class First(NamedTuple):
    """The first micro-batch of nonzero weight."""

    squared: jax.Array
    rows: jax.Array


def norms_of_one(call: Call, gradients: Any) -> Norms:
    """Of a batch that is one micro-batch: both are the same, which tells nothing."""
    rows = jnp.asarray(call.batch.rows, jnp.result_type(float))
    divisor = call.batch.rows**2 if call.options.reduction == "sum" else 1
    squared = squared_norm(gradients) / divisor
    return Norms(squared, rows, squared, rows)


class NoiseMeter:
    """The norms of one pass over the micro-batches of a batch."""

    def __init__(self, call: Call, count: int, varying: Iterable[str]) -> None:
        self.call = call
        self.count = count
        self._varying = tuple(sorted(varying))

    def start(self) -> First:
        """Nothing is measured yet."""
        return self._typed(*jnp.zeros(2, jnp.result_type(float)))

    def _typed(self, squared: Any, rows: Any) -> First:
        return as_varying(First(squared, rows), self._varying)

    def seen(self, first: First, gradients: list[Any], factors: dict[str, Any], group: Group) -> First:
        """A micro-batch of this group has these gradients, times these factors."""
        counts: Any = True
        multiple: Any = 1
        if not factors:
            multiple = group.size if self.call.options.reduction == "sum" else 1
        elif len(factors) == 1:
            (factor,) = factors.values()
            counts, multiple = factor > 0, jnp.where(factor > 0, factor, 1)
        else:  # by the denominators of the whole batch: an estimate of the mean gradient
            counts = jnp.any(jnp.stack([factor > 0 for factor in factors.values()]))
            multiple = self.count * group.size / self.call.batch.rows

        def measured() -> First:
            squared = squared_norm(gradients) / jnp.asarray(multiple, jnp.result_type(float)) ** 2
            return self._typed(squared, jnp.asarray(group.size, jnp.result_type(float)))

        return jax.lax.cond((first.rows == 0) & counts, measured, lambda: first)

    def finished(self, first: First, gradients: list[Any]) -> Norms:
        """With the gradients of the whole batch."""
        rows = self.call.batch.rows * self.call.devices
        squared, size = first
        if self.call.axes:  # each device has measured a micro-batch of its own
            some = size > 0
            measured = self.call.of_all_devices(some.astype(size.dtype))
            squared = self.call.of_all_devices(jnp.where(some, squared, 0)) / measured
            size = measured / self.call.of_all_devices(jnp.where(some, 1 / jnp.where(some, size, 1), 0))
        large = squared_norm(gradients) / (rows**2 if self.call.options.reduction == "sum" else 1)
        return Norms(squared, size, large, jnp.asarray(rows, size.dtype))
