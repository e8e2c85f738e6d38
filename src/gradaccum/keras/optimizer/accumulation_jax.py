"""Accumulation under JAX: everything is a value, and only the branch that closes a window runs the inner optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from gradaccum.keras.optimizer.counts import Counts
from gradaccum.keras.optimizer.sums import added
from gradaccum.keras.optimizer.sums import means as means_of

__all__ = ["accumulate", "beside", "close", "host", "put", "replica", "total"]


def accumulate(optimizer: Any, gradients: list[Any], rows: Any) -> None:
    """Add a micro-batch's gradients to the window, and close it if it is full."""
    counts = Counts(*optimizer._counts.value)
    weight = optimizer._weigh(counts, rows)
    variables = optimizer._trainable_variables
    sums = [
        total.value if gradient is None else added(optimizer, total.value, gradient, variable, weight)
        for total, gradient, variable in zip(optimizer._sums, gradients, variables)
    ]
    present = jnp.asarray([gradient is not None for gradient in gradients], optimizer._touched.dtype)
    touched = jnp.maximum(optimizer._touched.value, present)
    counts, closes = optimizer._add(counts, weight)
    if isinstance(closes, jax.core.Tracer):
        _traced(optimizer, sums, counts, touched, closes, [g is None for g in gradients])
        return
    _assign(optimizer._sums, sums)
    _assign([optimizer._counts, optimizer._touched], [_vector(counts), touched])
    if closes:
        close(optimizer)


def close(optimizer: Any) -> None:
    """Close the window with what it holds, outside of a compiled function."""
    inner = optimizer.inner_optimizer
    counts = Counts(*optimizer._counts.value)
    means = means_of(optimizer, [total.value for total in optimizer._sums], counts.weight)
    touched = keras.ops.convert_to_numpy(optimizer._touched.value)
    before = jnp.asarray(inner.iterations)
    if touched.any():
        inner.apply([mean if t else None for mean, t in zip(means, touched)], optimizer._trainable_variables)
    updated = jnp.asarray(inner.iterations) != before if optimizer._can_skip else 1
    _assign(optimizer._sums, [jnp.zeros_like(total.value) for total in optimizer._sums])
    _assign(
        [optimizer._counts, optimizer._touched],
        [_vector(optimizer._closed(counts, updated)), jnp.zeros_like(optimizer._touched.value)],
    )


def _traced(optimizer: Any, sums: Any, counts: Counts, touched: Any, closes: Any, absent: list[bool]) -> None:
    """The same in a compiled function. No assignment happens in a branch: branches return values."""
    inner, variables = optimizer.inner_optimizer, optimizer._trainable_variables
    inner_variables = inner.variables

    def update(weights: Any, state: Any, sums: Any) -> Any:
        means = means_of(optimizer, sums, counts.weight)

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
    _assign(optimizer._sums, sums)
    updated = jnp.asarray(inner.iterations) != before if optimizer._can_skip else 1
    vector = jnp.where(closes, _vector(optimizer._closed(counts, updated)), _vector(counts))
    _assign([optimizer._counts, optimizer._touched], [vector, jnp.where(closes, 0, touched)])


def _vector(counts: Counts) -> Any:
    return jnp.stack([jnp.asarray(count, "int32") for count in counts])


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def replica() -> int:
    """Which replica's training step this is; JAX has one, over all devices."""
    return 0


host = contextlib.nullcontext


def beside(optimizer: Any, variable: Any) -> Any:
    """Where the variables that go with this one are made."""
    return contextlib.nullcontext()


def total(variable: Any) -> Any:
    """A sum over all replicas."""
    return variable.value


def put(variable: Any, value: Any) -> None:
    """Let the replicas' sums add up to this."""
    variable.assign(value)
