"""How long the window is that opens now, inside a compiled function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.schedule import Schedule

__all__ = ["steps_of"]

_CONCRETE_ONLY = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
)  # fmt: skip


def steps_of(schedule: Schedule, epoch: jax.Array, update: jax.Array) -> jax.Array:
    """The steps of the window that opens in this epoch, after so many updates: an int32 scalar.

    Raises:
        TypeError: A callable schedule needs numbers where it gets traced ones, or returns something else than an int.
        ValueError: It returns an int below 1.
    """
    if schedule.function is None:
        starts, steps = np.array(schedule.to_pairs(), np.int32).T
        return jnp.asarray(steps)[jnp.searchsorted(jnp.asarray(starts), epoch, side="right") - 1]
    try:
        steps = schedule.function(epoch, update)
    except _CONCRETE_ONLY as error:
        raise TypeError(
            "Inside jit, a callable `steps` gets `epoch` and `update` as traced arrays, and this one needs their "
            "values. Write it in jax.numpy, as in lambda epoch, update: jnp.where(update < 100, 1, 4)."
        ) from error
    if isinstance(steps, jax.core.Tracer):
        return _checked_traced(steps)
    if isinstance(steps, (jax.Array, np.ndarray)) and steps.ndim == 0:
        steps = steps.item()
    return jnp.asarray(Schedule(lambda epoch, update: steps)(), jnp.int32)


def _checked_traced(steps: Any) -> jax.Array:
    if steps.shape or not jnp.issubdtype(steps.dtype, jnp.integer):
        raise TypeError(
            f"A callable `steps` must return an int >= 1. Received: {steps.dtype}{list(steps.shape)} from the callable."
        )
    return steps.astype(jnp.int32)
