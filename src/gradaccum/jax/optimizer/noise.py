"""The gradient noise scale, measured from the gradients that a windowed optimizer has anyway."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.core.noise import NoiseScale, Norms, estimate
from gradaccum.jax.batch import squared_norm
from gradaccum.jax.optimizer.state import found_state

__all__ = ["NoiseState", "add_micro_batch", "close_window", "empty_noise", "noise_scale"]

KEEP = 500
"""Windows to look back on: the noise scale drifts."""


class NoiseState(NamedTuple):
    """Two squared norms per window: of its first micro-batch of nonzero weight, and of the finished mean."""

    first: jax.Array
    first_size: jax.Array
    windows: jax.Array
    measured: jax.Array
    weighed: jax.Array


def empty_noise() -> NoiseState:
    """Nothing measured yet."""
    real = jnp.result_type(float)
    return NoiseState(
        first=jnp.zeros((), real),
        first_size=jnp.zeros((), real),
        windows=jnp.zeros((KEEP, 4), real),
        measured=jnp.zeros((), jnp.int32),
        weighed=jnp.zeros((), bool),
    )


def add_micro_batch(noise: NoiseState, gradients: Any, weight: jax.Array, weighed: bool) -> NoiseState:
    """A micro-batch of this mean gradient joins the window."""
    is_first = (noise.first_size == 0) & (weight > 0)
    squared = jax.lax.cond(is_first, lambda: squared_norm(gradients), lambda: noise.first)
    size = jnp.where(is_first, weight, noise.first_size)
    return noise._replace(first=squared, first_size=size, weighed=noise.weighed | weighed)


def close_window(noise: NoiseState, mean: Any, weight: jax.Array) -> NoiseState:
    """The window closes with this mean gradient. One of a single micro-batch tells nothing."""
    empty = noise._replace(first=jnp.zeros_like(noise.first), first_size=jnp.zeros_like(noise.first_size))
    row = jnp.stack([noise.first, noise.first_size, squared_norm(mean), weight])
    usable = weight > noise.first_size
    windows = noise.windows.at[noise.measured % KEEP].set(jnp.where(usable, row, noise.windows[noise.measured % KEEP]))
    return empty._replace(windows=windows, measured=noise.measured + usable.astype(jnp.int32))


def noise_scale(state: Any) -> NoiseScale:
    """The gradient noise scale that was measured on the way: how many rows an update can use.

    It waits for the device, so call it now and then, outside of `jax.jit`. With `windowed(..., noise_scale=True)` it is
    measured in rows where micro-batches come with `weight=` (their rows), in micro-batches where they don't; with
    `value_and_grad(..., noise_scale=True)` in rows.

    Args:
        state: The windowed optimizer's; or a larger state with one such in it. Or the norms that `value_and_grad` has
            returned: a list with those of each update, or what `lax.scan` made of them.

    Returns:
        A `gradaccum.core.noise.NoiseScale`, with `.value`, `.interval` and `.advice()`.

    Raises:
        ValueError: The state has none: the optimizer was made without `noise_scale=True`.

    Example:
        >>> import optax
        >>> from gradaccum.jax import windowed
        >>> optimizer = windowed(optax.sgd(0.0), steps=4, noise_scale=True)
        >>> params, draw = jnp.zeros(10), np.random.default_rng(0)
        >>> state, update = optimizer.init(params), jax.jit(optimizer.update)
        >>> for _ in range(400):                           # |G|^2 = 10; each row adds noise of variance 4 * 10
        ...     gradient = jnp.asarray(1 + draw.normal(size=(2, 10), scale=2).mean(0), params.dtype)
        ...     _, state = update(gradient, state, params, weight=2)
        >>> low, high = noise_scale(state).interval        # the truth is 4 rows
        >>> bool(low < 4 < high)
        True
    """
    norms = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_norms) if _is_norms(leaf)]
    if norms or (isinstance(state, list) and not state):
        return estimate([Norms(*row) for each in jax.device_get(norms) for row in _updates(each)])
    noise = found_state(state).noise
    if noise is None:
        raise ValueError("Nothing was measured: make the optimizer with windowed(optimizer, steps, noise_scale=True).")
    count = min(int(noise.measured), KEEP)
    windows = [Norms(*map(float, row)) for row in np.asarray(noise.windows)[:count]]
    return estimate(windows, unit="rows" if bool(noise.weighed) else "micro-batches")


def _is_norms(node: Any) -> bool:
    return isinstance(node, Norms)


def _updates(norms: Norms) -> list[list[float]]:
    """The norms of each update; there are several where they were stacked."""
    return np.stack([np.ravel(number) for number in np.broadcast_arrays(*norms)], axis=-1).tolist()
