"""`noise_scale=True`: the norms of the first micro-batch's gradient and of the whole batch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.core.noise import Norms
from gradaccum.jax.batch import Group, as_varying, squared_norm
from gradaccum.jax.train_step.accumulate import Accumulation
from gradaccum.jax.train_step.call import Call


class _First(NamedTuple):
    """The first micro-batch of nonzero weight, for the noise scale: its gradient's squared norm, and its rows."""

    squared: Any
    rows: Any


class MeasuredAccumulation(Accumulation):
    """One pass over the micro-batches of a batch, which carries the norm of the first one's gradient along."""

    def __init__(self, call: Call, groups: list[Group]) -> None:
        super().__init__(call, groups)
        if not any(way.parameter is not None for way in self.summed):
            options = call.options
            raise ValueError(
                "noise_scale=True measures gradients that are summed over rows, but `argnums` names only the batch. "
                f"Received: argnums={options.argnums}, batch_argnums={options.batch_argnums}."
            )

    def measured(self) -> _First:
        return self._first(*jnp.zeros(2, jnp.result_type(float)))

    def _first(self, squared: Any, rows: Any) -> _First:
        return as_varying(_First(squared, rows), self.varying)

    def with_micro_batch(self, measured: _First, gradients: list[Any], factors: dict[str, Any], group: Group) -> _First:
        counts: Any = True
        multiple: Any = 1
        if not factors:
            multiple = group.size if self.options.reduction == "sum" else 1
        elif len(factors) == 1:
            (factor,) = factors.values()
            counts, multiple = factor > 0, jnp.where(factor > 0, factor, 1)
        else:  # by the denominators of the whole batch: an estimate of the mean gradient
            counts = jnp.any(jnp.stack([factor > 0 for factor in factors.values()]))
            multiple = self.count * group.size / self.call.batch.rows

        def of_this() -> _First:
            squared = squared_norm(gradients) / jnp.asarray(multiple, jnp.result_type(float)) ** 2
            return self._first(squared, jnp.asarray(group.size, jnp.result_type(float)))

        return jax.lax.cond((measured.rows == 0) & counts, of_this, lambda: measured)

    def finished(self, measured: _First, gradients: list[Any]) -> Norms:
        rows, of_all = self.call.batch.rows * self.call.devices, self.call.of_all_devices
        squared, size = measured
        if self.call.axes:  # each device has measured a micro-batch of its own
            some = size > 0
            devices = of_all(some.astype(size.dtype))
            squared = of_all(jnp.where(some, squared, 0)) / devices
            size = devices / of_all(jnp.where(some, 1 / jnp.where(some, size, 1), 0))
        of_mean = squared_norm(gradients) / (rows**2 if self.options.reduction == "sum" else 1)
        return Norms(squared, size, of_mean, jnp.asarray(rows, size.dtype))
