"""Accumulation under JAX: everything is a value, and only the branch that closes a window runs the inner optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from gradaccum.keras.optimizer.window import Counts, Window, added, rescaled

__all__ = ["accumulate", "beside", "close", "host", "place_of", "put", "replica", "total"]


def accumulate(window: Window, gradients: list[Any], rows: Any) -> None:
    """Add a micro-batch's gradients to the window, and close it if it is full."""
    counts, weight, rescale, closes = window.rule.add(Counts(*window.counts.value), rows)
    sums = [
        rescaled(total.value, variable, rescale)
        if gradient is None
        else added(total.value, gradient, variable, weight, rescale)
        for total, gradient, variable in zip(window.sums, gradients, window.variables)
    ]
    present = jnp.asarray([gradient is not None for gradient in gradients], window.touched.dtype)
    touched = jnp.maximum(window.touched.value, present)
    if isinstance(closes, jax.core.Tracer):
        _traced(window, sums, counts, touched, closes, [g is None for g in gradients])
        return
    _assign(window.sums, sums)
    _assign([window.counts, window.touched], [_vector(counts), touched])
    if closes:
        close(window)


def close(window: Window) -> None:
    """Close the window with what it holds, outside of a compiled function."""
    inner = window.inner
    counts = Counts(*window.counts.value)
    means = window.means([total.value for total in window.sums], counts.weight)
    touched = keras.ops.convert_to_numpy(window.touched.value)
    before = jnp.asarray(inner.iterations)
    if touched.any():
        # Not apply(): that of a LossScaleOptimizer assigns inside of a branch.
        some, inner_variables = [mean if t else None for mean, t in zip(means, touched)], inner.variables
        values = [[v.value for v in variables] for variables in (inner_variables, window.variables)]
        weights, state = inner.stateless_apply(values[0], some, values[1])
        _assign(window.variables, weights)
        _assign(inner_variables, state)
    updated = jnp.asarray(inner.iterations) != before if window.may_skip else 1
    _assign(window.sums, [jnp.zeros_like(total.value) for total in window.sums])
    _assign(
        [window.counts, window.touched],
        [_vector(window.rule.closed(counts, updated)), jnp.zeros_like(window.touched.value)],
    )


def _traced(window: Window, sums: Any, counts: Counts, touched: Any, closes: Any, absent: list[bool]) -> None:
    """The same in a compiled function. No assignment happens in a branch: branches return values."""
    inner, variables = window.inner, window.variables
    inner_variables = inner.variables

    def update(weights: Any, state: Any, sums: Any) -> Any:
        means = window.means(sums, counts.weight)

        def all_of_them() -> Any:
            return inner.stateless_apply(state, means, weights)

        def without_absent() -> Any:
            some = [None if none else mean for mean, none in zip(means, absent)]
            return inner.stateless_apply(state, some, weights)

        if any(absent):
            # Whether an earlier micro-batch of the window had a gradient for one of them is known only at run time.
            weights, state = jax.lax.cond(jnp.any(touched[np.flatnonzero(absent)] > 0), all_of_them, without_absent)
        else:
            weights, state = all_of_them()
        return list(weights), list(state), [jnp.zeros_like(total) for total in sums]

    def wait(weights: Any, state: Any, sums: Any) -> Any:
        return weights, state, sums

    before = jnp.asarray(inner.iterations)
    weights, state, sums = jax.lax.cond(
        closes, update, wait, [v.value for v in variables], [v.value for v in inner_variables], sums
    )
    _assign(variables, weights)
    _assign(inner_variables, state)
    _assign(window.sums, sums)
    updated = jnp.asarray(inner.iterations) != before if window.may_skip else 1
    vector = jnp.where(closes, _vector(window.rule.closed(counts, updated)), _vector(counts))
    _assign([window.counts, window.touched], [vector, jnp.where(closes, 0, touched)])


def _vector(counts: Counts) -> Any:
    return jnp.stack([jnp.asarray(count, "int32") for count in counts])


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def replica() -> int:
    """Which replica's training step this is; JAX has one, over all devices."""
    return 0


def place_of(optimizer: Any) -> None:
    """Where an optimizer's variables live: JAX knows by itself."""


host = contextlib.nullcontext


def beside(place: Any, variable: Any) -> Any:
    """Where the variables that go with this one are made."""
    return contextlib.nullcontext()


def total(variable: Any) -> Any:
    """A sum over all replicas."""
    return variable.value


def put(variable: Any, value: Any) -> None:
    """Let the replicas' sums add up to this."""
    variable.assign(value)
