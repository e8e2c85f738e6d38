"""`value_and_grad` and `grad`: JAX' own, over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["grad", "value_and_grad"]


def value_and_grad(loss_fn: Callable[..., Any], *, micro_batch_size: int) -> Callable[..., Any]:
    """Like `jax.value_and_grad(loss_fn)`, in the memory of a micro-batch.

    Args:
        loss_fn: `loss_fn(params, batch)` returns the mean loss over the batch's rows.
        micro_batch_size: Rows that one forward and backward pass may hold.

    Example:
        >>> def loss_fn(params, batch):
        ...     return ((batch @ params) ** 2).mean()
        >>> loss, grads = value_and_grad(loss_fn, micro_batch_size=2)(jnp.ones(3), jnp.ones((4, 3)))
        >>> float(loss), grads.tolist()
        (9.0, [6.0, 6.0, 6.0])
    """
    plain = jax.value_and_grad(loss_fn)

    def value_and_grad_of(params: Any, batch: Any) -> Any:
        rows = jax.tree.leaves(batch)[0].shape[0]
        total: Any = None
        for start in range(0, rows, micro_batch_size):
            micro_batch = jax.tree.map(lambda leaf: leaf[start : start + micro_batch_size], batch)  # noqa: B023  # used at once
            weight = jax.tree.leaves(micro_batch)[0].shape[0] / rows
            weighed = jax.tree.map(lambda number: weight * number, plain(params, micro_batch))  # noqa: B023
            total = weighed if total is None else jax.tree.map(jnp.add, total, weighed)
        return total

    return value_and_grad_of


def grad(loss_fn: Callable[..., Any], *, micro_batch_size: int) -> Callable[..., Any]:
    """The gradient of `value_and_grad`, with the same keywords, as `jax.grad` has it.

    Args:
        loss_fn: As in `value_and_grad`.
        micro_batch_size: As in `value_and_grad`.

    Example:
        >>> grad(lambda w, x: ((x @ w) ** 2).mean(), micro_batch_size=2)(jnp.ones(3), jnp.ones((4, 3))).tolist()
        [6.0, 6.0, 6.0]
    """
    both = value_and_grad(loss_fn, micro_batch_size=micro_batch_size)
    return lambda *args: both(*args)[1]
