"""What a windowed optimizer remembers: arrays only, so that jit, pickle and orbax take it as any other state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum.core.noise import NoiseScale, Norms, estimate
from gradaccum.jax.batch import squared_norm


class WindowedState(NamedTuple):
    """The open window, and the inner optimizer's state.

    Args:
        inner_state: The inner optimizer's own; it changes once per update.
        sums: `sum_i w_i g_i` of the open window, a leaf for each parameter. What is in it between windows counts for
            nothing: the next one begins anew.
        weight: `sum_i w_i` of the open window.
        weighed: Whether its micro-batches come with a `weight`.
        micro_batches: Micro-batches in the open window.
        steps: The length of the open window, set when it opens.
        epoch: Epochs that `flush` has ended.
        updates: Updates that were made.
        updated: Whether the last call made one.
        value_sum, value_weight: `sum_i w_i value_i` of the micro-batches that came with a `value`, and their weight.
        noise: What measures the noise scale, or None.
    """

    inner_state: Any
    sums: Any
    weight: jax.Array
    weighed: jax.Array
    micro_batches: jax.Array
    steps: jax.Array
    epoch: jax.Array
    updates: jax.Array
    updated: jax.Array
    value_sum: jax.Array
    value_weight: jax.Array
    noise: Any = None


def updated(state: Any) -> jax.Array:
    """Whether the last `update` or `flush` made an update of the parameters.

    Args:
        state: The state that it returned, or a larger state that contains it, as of `optax.chain`.

    Returns:
        A bool array, so that it can be used inside `jax.jit`.

    Raises:
        ValueError: There is no windowed optimizer's state in it, or more than one.

    Example:
        >>> import jax.numpy as jnp
        >>> from gradaccum.jax import windowed
        >>> optimizer, params = windowed(optax.sgd(0.1), steps=2), jnp.ones(3)
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = optimizer.update(jnp.ones(3), state, params)
        ...     print(updated(state), updates)
        False [0. 0. 0.]
        True [-0.1 -0.1 -0.1]
    """
    return _found_state(state).updated


def _found_state(state: Any) -> WindowedState:
    """The one windowed state that is in this pytree.

    Raises:
        ValueError: There is none, or more than one.
    """
    found = [leaf for leaf in _states(state) if isinstance(leaf, WindowedState)]
    if len(found) != 1:
        raise ValueError(
            f"`state` must hold the state of one windowed optimizer. Received: {type(state).__name__} with "
            f"{len(found)} of them. Pass the part that `windowed(...).update` returned."
        )
    return found[0]


def refuse_accumulating(inner_state: Any) -> None:
    """Raises ValueError where the inner optimizer accumulates by itself: its windows would multiply with these."""
    for leaf in _states(inner_state):
        if isinstance(leaf, (WindowedState, optax.MultiStepsState, optax.ApplyEvery)):
            raise ValueError(
                f"The inner optimizer accumulates gradients by itself: its state has a {type(leaf).__name__} in it, so "
                "an update would take the product of both windows. Give windowed() the optimizer alone."
            )


def _states(tree: Any) -> list[Any]:
    kinds = (WindowedState, optax.MultiStepsState, optax.ApplyEvery)
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, kinds))]


# The gradient noise scale, measured from the gradients that a windowed optimizer has anyway.

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
    number = jnp.zeros((), jnp.result_type(float))
    return NoiseState(number, number, jnp.zeros((KEEP, 4), number.dtype), jnp.zeros((), jnp.int32), jnp.zeros((), bool))


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
    """The measured gradient noise scale: how many rows an update can use.

    It waits for the device, so call it rarely, outside `jax.jit`. With `windowed(..., noise_scale=True)` it is in rows
    if micro-batches come with `weight=` (their rows), else in micro-batches; with `value_and_grad(...,
    noise_scale=True)` in rows.

    Args:
        state: The windowed optimizer's state, or a larger state that contains it. Or the norms that `value_and_grad`
            returned, a list with those of each update, or stacked by `lax.scan`.

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
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Norms))
    norms = [leaf for leaf in leaves if isinstance(leaf, Norms)]
    if norms or (isinstance(state, list) and not state):
        numbers = [np.broadcast_arrays(*each) for each in jax.device_get(norms)]  # of several updates where stacked
        return estimate([Norms(*row) for each in numbers for row in np.stack([*map(np.ravel, each)], -1).tolist()])
    noise = _found_state(state).noise
    if noise is None:
        raise ValueError("Nothing was measured: make the optimizer with windowed(optimizer, steps, noise_scale=True).")
    count = min(int(noise.measured), KEEP)
    windows = [Norms(*map(float, row)) for row in np.asarray(noise.windows)[:count]]
    return estimate(windows, unit="rows" if bool(noise.weighed) else "micro-batches")
