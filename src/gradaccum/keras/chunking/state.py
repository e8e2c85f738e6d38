"""The variables that a layer's forward pass assigns, and what becomes of them over the micro-batches of a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from gradaccum.keras.batch_norm import Pool
from gradaccum.keras.private import uncast_values

__all__ = ["State"]


class State:
    """Where these variables are at the start, between micro-batches, and after the call.

    - Seeds, metrics, and the moving statistics that `batch_norm` lets move with every micro-batch, go from one
      micro-batch to the next.
    - Statistics that are pooled move once, by mean and variance of the whole batch.
    - Each micro-batch finds all others as they were, and they end up where it takes them on average over rows: exact
      for counters, for what depends on the weights alone, and for moving averages of means over rows.

    The carry that a backend's loop takes along is a flat list of tensors.

    `read` it before anything else.
    """

    def __init__(self, body: Any, assigned: Iterable[Any]) -> None:
        variables = list(assigned)
        trained = [variable.path for variable in variables if variable.trainable]
        if trained:
            raise ValueError(
                f"The chunked {type(body.layer).__name__} {body.layer.name!r} assigns trainable variables in its "
                f"forward pass: {', '.join(trained)}. So micro-batches would be of other weights than the whole batch."
            )
        metrics = {id(variable) for variable in getattr(body.layer, "metrics_variables", ())}
        moving = {id(v) for layer in body.batch_norms for v in (layer.moving_mean, layer.moving_variance)}
        ids = {id(variable) for variable in variables}
        pooled = body.batch_norm == "pooled"
        self.pooled = [layer for layer in body.batch_norms if pooled and id(layer.moving_mean) in ids]
        self.pool = Pool(self.pooled)
        pooled_ids = {id(variable) for variable in self.pool.variables}
        self._threaded = [
            variable
            for variable in variables
            if "seed_generator_state" in (variable.path or "") or id(variable) in metrics | (moving - pooled_ids)
        ]
        known = {id(variable) for variable in self._threaded} | pooled_ids
        self.averaged = [variable for variable in variables if id(variable) not in known]
        """Those that end up where micro-batches take them on average."""
        self.variables = [*self._threaded, *self.averaged, *self.pool.variables]
        """All of them, in the order of `values`."""
        self._before: list[Any] = []

    def read(self) -> None:
        """Note the values at the start of the call: not while it is only found out what the call moves."""
        self._before = [ops.copy(ops.convert_to_tensor(value)) for value in uncast_values(self.variables)]

    def start(self) -> list[Any]:
        """The carry before the first micro-batch."""
        threaded = len(self._threaded)
        averaged = [
            ops.zeros_like(before) if keras.backend.is_float_dtype(variable.dtype) else before
            for variable, before in zip(self.averaged, self._before[threaded:])
        ]
        return [*self._before[:threaded], *averaged, *self.pool.zeros()]

    def values(self, carry: list[Any]) -> list[Any]:
        """What `variables` hold for the next micro-batch."""
        threaded = len(self._threaded)
        return [*carry[:threaded], *self._before[threaded:]]

    def after(self, carry: list[Any], values: list[Any], valid: dict[int, Any], size: Any, rows: Any) -> list[Any]:
        """The carry after a micro-batch."""
        threaded, averaged = len(self._threaded), len(self.averaged)
        after = list(values[:threaded])
        for variable, total, value in zip(self.averaged, carry[threaded:], values[threaded:]):
            if keras.backend.is_float_dtype(variable.dtype):
                share = ops.cast(size, total.dtype) / ops.cast(rows, total.dtype)
                value = total + ops.cast(value, total.dtype) * share
            after.append(value)
        pooled = threaded + averaged
        return [*after, *self.pool.add(carry[pooled:], values[pooled:], valid, size)]

    def finish(self, carry: list[Any]) -> None:
        """Assign what the last carry says."""
        pooled = len(self._threaded) + len(self.averaged)
        values = [*carry[:pooled], *self.pool.moved(carry[pooled:], self._before[pooled:])]
        for variable, value in zip(self.variables, values):
            variable.assign(value)
