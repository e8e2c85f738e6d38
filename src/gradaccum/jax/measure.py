"""The largest micro-batch for a memory limit: what XLA states once it has compiled, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from gradaccum.core.sizes import (
    MARGIN,
    DoesNotFit,
    SizeEstimate,
    format_bytes,
    free_host_memory,
    largest_size,
    parse_bytes,
)  # fmt: skip
from gradaccum.jax.batch import Batch, argument_numbers, axes_of_each, stated_bytes
from gradaccum.jax.train_step import value_and_grad


def estimate_size(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *more: Any,
    memory_limit: int | str | None = None,
    optimizer: Any = None,
    margin: float = MARGIN,
    batch_argnums: int | tuple[int, ...] = 1,
    in_axes: Any = 0,
    **value_and_grad_keywords: Any,
) -> SizeEstimate:
    """The largest micro-batch of this batch whose memory, as XLA states it, stays within a limit. Nothing runs.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"a": jnp.zeros((64, 1024)), "b": jnp.zeros((1024, 1))}
        >>> loss_fn = lambda p, x: ((jnp.tanh(jnp.tanh(x @ p["a"])) @ p["b"]) ** 2).mean()
        >>> estimate = estimate_size(loss_fn, params, jnp.zeros((4096, 64)), memory_limit="8MiB")
        >>> 64 < estimate.micro_batch_size < 4096
        True
    """
    if not 0 <= margin < 1:
        raise ValueError(f"`margin` must be a number in [0, 1). Received: margin={margin!r}.")
    args = (params, batch, *more)
    numbers = argument_numbers("batch_argnums", batch_argnums)
    names = tuple("batch" if n == 1 else f"args[{n}]" for n in numbers)
    rows = Batch(tuple(args[n] for n in numbers), axes_of_each(in_axes, batch_argnums), names).rows
    limit = parse_bytes(memory_limit) or _device_memory()
    if limit is None:
        raise ValueError('This machine does not report how much memory it has. Give `memory_limit`, such as "16GiB".')
    state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, params)
    keywords = {"batch_argnums": batch_argnums, "in_axes": in_axes, "verify": False, **value_and_grad_keywords}
    constant = {"state": _bytes(state), "arguments": _bytes(args), "gradients": _bytes(params)}

    def peak(size: int) -> int:
        compiled = jax.jit(value_and_grad(loss_fn, micro_batch_size=size, **keywords)).lower(*args).compile()
        return constant["state"] + stated_bytes(compiled)

    allowed = (1 - margin) * limit
    size, needed = largest_size(peak, rows, allowed)
    if needed > allowed:
        raise DoesNotFit(
            f"Not even a micro-batch of one row fits: it needs about {format_bytes(needed)}, and "
            f"{format_bytes(int(allowed))} are available ({100 * margin:.0f} % of {format_bytes(int(limit))} left "
            "free). Make the model smaller, shard it, or use jax.checkpoint or bfloat16."
        )
    return SizeEstimate(size, rows, int(limit), needed, sum(constant.values()), margin)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def _device_memory() -> int | None:
    stated = jax.local_devices()[0].memory_stats() or {}
    limit = stated.get("bytes_limit")
    return int(limit) if limit else free_host_memory()
