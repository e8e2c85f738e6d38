"""`chunked`: a function over rows, in the memory of a few, for any loss on all its outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from gradaccum.jax.batch import Batch, argument_names, argument_numbers, axes_of_each
from gradaccum.jax.chunking.two_passes import Body, in_two_passes
from gradaccum.schedule import checked_count


def chunked(
    fn: Callable[..., Any],
    micro_batch_size: int,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    in_axes: Any = 0,
    keep: int = 0,
    rng_argnum: int | None = None,
) -> Callable[..., Any]:
    """`fn` over micro-batches: the whole batch's outputs and gradients, for any loss, in the memory of a few rows.

    The first pass runs `fn` over micro-batches and keeps only the outputs; the loss sees all of them; backward runs
    each micro-batch again and adds up  `dL/dp = sum_i (dL/d out_i) (d out_i/dp)`.  It goes inside your own `jax.jit`,
    `jax.grad` and `shard_map`. `jax.grad` of `jax.grad` is exact too; forward mode (`jax.jvp`) raises JAX' error about
    `custom_vjp`.

    A row's output must depend only on that row and on shared arguments. Arguments, and values that `fn` closes over,
    are pytrees; leaves that are no arrays (functions, strings, Python's numbers) stay as they are. All inputs that need
    a gradient get one.

    Args:
        fn: `fn(params, batch)` returns arrays with a row for each row in their first axis, in any pytree. All
            micro-batches share its keyword arguments.
        micro_batch_size: Rows that one forward and backward pass may hold.
        batch_argnums: Which arguments are cut into micro-batches.
        in_axes: The axis of their rows, as for `jax.vmap`: an int, or a pytree prefix of the batch (one for each, where
            `batch_argnums` is a tuple). None marks arguments that every micro-batch needs whole.
        keep: Micro-batches that keep their activations and aren't run again, which saves time for memory.
        rng_argnum: An argument that is a key, or a pytree of keys: each of n micro-batches gets one of
            `jax.random.split(key, n)`, the same in both passes. A batch that is a single micro-batch gets the key
            itself. (With a key for each row, as a part of the batch, random numbers don't depend on the size.)

    Raises:
        TypeError, ValueError: An option or the batch isn't as described; an output has no row for each row; `fn` draws
            random numbers for its rows from a key that all micro-batches share. Raised while tracing, with the name.

    Example:
        >>> import jax.numpy as jnp
        >>> encode = chunked(lambda params, x: jnp.tanh(x @ params), 16)
        >>> def loss_fn(params, x, y):                     # every row against every other
        ...     logits = encode(params["x"], x) @ encode(params["y"], y).T
        ...     return -jnp.diag(jax.nn.log_softmax(logits)).mean()
        >>> params = {"x": jnp.ones((3, 2)), "y": jnp.eye(3, 2)}
        >>> loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, jnp.ones((100, 3)), jnp.ones((100, 3)))
        >>> grads["x"].shape
        (3, 2)
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function. Received: fn={fn!r} of type {type(fn).__name__}.")
    checked_count(micro_batch_size, "micro_batch_size")
    checked_count(keep, "keep", least=0)
    batches = argument_numbers("batch_argnums", batch_argnums)
    keys = () if rng_argnum is None else argument_numbers("rng_argnum", rng_argnum)
    if set(batches) & set(keys):
        raise ValueError(f"Argument {rng_argnum} of fn can't be in both `batch_argnums` and `rng_argnum`.")
    axes = axes_of_each(in_axes, batch_argnums)

    @functools.wraps(fn)
    def in_chunks(*args: Any, **kwargs: Any) -> Any:
        for name, number in [*(("batch_argnums", n) for n in batches), *(("rng_argnum", n) for n in keys)]:
            if number >= len(args):
                raise TypeError(
                    f"`{name}` names argument {number}, but there are {len(args)} positional ones (the first is 0). "
                    "Pass it by position, or give another number."
                )
        batch = Batch(tuple(args[n] for n in batches), axes, argument_names(fn, batches))
        groups = batch.groups(micro_batch_size)
        count = sum(group.count for group in groups)
        body = Body(fn, args, kwargs, batches, keys, batch)
        if count == 1:
            body.check(groups)
            return fn(*args, **kwargs)
        split = [jax.random.split(key, count) for key in body.keys]
        return in_two_passes(body, groups, keep, split)

    return in_chunks
