"""The squared norm of a gradient, from which the noise scale is estimated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["squared_norm"]


def squared_norm(gradients: Any) -> jax.Array:
    """The squared norm over all leaves, in JAX' widest dtype.

    Example:
        >>> float(squared_norm({"a": jnp.ones(3), "b": jnp.asarray(2.0)}))
        7.0
    """
    wide = jnp.result_type(float)
    leaves = jax.tree.leaves(gradients)
    return sum((jnp.sum(jnp.square(jnp.abs(leaf)), dtype=wide) for leaf in leaves), jnp.zeros((), wide))
