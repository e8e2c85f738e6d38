"""What a windowed optimizer remembers: arrays only, so that jit, pickle and orbax take it as any other state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

__all__ = ["WindowedState", "found_state", "refuse_accumulating", "updated"]


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
        state: What it returned; or a larger state with one such in it, as of `optax.chain`.

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
    return found_state(state).updated


def found_state(state: Any) -> WindowedState:
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
