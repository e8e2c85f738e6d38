"""`value_and_grad` and `grad`: JAX' own, over micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec

from gradaccum.jax.train_step.accumulate import Accumulation, accumulated
from gradaccum.jax.train_step.auto_size import AutoSize
from gradaccum.jax.train_step.call import Call
from gradaccum.jax.train_step.devices import data_axes, on_each_device
from gradaccum.jax.train_step.noise import MeasuredAccumulation
from gradaccum.jax.train_step.options import checked_options
from gradaccum.jax.train_step.verify import Verification

Arguments = ParamSpec("Arguments")
"""The arguments of the loss, which are those of the function that is returned."""


def value_and_grad(
    loss_fn: Callable[Arguments, Any],
    *,
    micro_batch_size: int | Literal["auto"],
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    in_axes: Any = 0,
    weight: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    has_aux: bool = False,
    aux: Any = "concat",
    rng_argnum: int | None = None,
    state_argnum: int | None = None,
    accumulate_dtype: Any = None,
    memory_limit: int | str | None = None,
    noise_scale: bool = False,
    verify: bool = True,
) -> Callable[Arguments, Any]:
    """Like `jax.value_and_grad(loss_fn)`, in the memory of a micro-batch.

    The function that it returns takes the arguments of `loss_fn` and gives the loss and gradients of the whole batch,

        loss = sum_i w_i loss_i / sum_i w_i,    gradients = sum_i w_i gradients_i / sum_i w_i,

    with w_i the rows of micro-batch i, or its `weight`. It belongs inside your own `jax.jit`, `jax.vmap`, `lax.scan` or
    `jax.shard_map`: the micro-batches run in a `lax.scan`, one body for each of at most two sizes.

    Args:
        loss_fn: `loss_fn(params, batch, ...)` returns the mean loss over the batch's rows, a scalar; or
            `{name: (loss, weight)}`, means with a denominator each: then the loss that is returned is
            `{name: loss}`, and the gradients are those of their sum.
        micro_batch_size: Rows that one forward and backward pass may hold; or `"auto"`: the fastest of a few sizes that
            are compiled and timed on zeros when a new shape is traced, of those that fit. The log states it.
        argnums: Which arguments to differentiate, as for `jax.grad`. Gradients of a batch have its rows.
        batch_argnums: Which arguments are cut into micro-batches: pytrees of arrays.
        in_axes: The axis of their rows, as for `jax.vmap`: an int, or a pytree prefix of the batch (one for each, where
            `batch_argnums` is a tuple). None marks arguments that every micro-batch needs whole.
        weight: `weight(*batch)` with the batch arguments returns what the loss of these rows is a mean over, if that
            isn't rows: `lambda batch: batch["mask"].sum()`. A micro-batch of weight 0 is left out, even if its loss is
            0 / 0. A weight that is negative or not finite is an error, or, if it is traced, makes the result NaN.
        reduction: `"mean"`, or `"sum"` for a loss that is a sum over rows.
        has_aux: `loss_fn` returns `(loss, aux)`; the value is `(loss, aux)`, too.
        aux: How the aux of micro-batches is combined: `"concat"` (it has a row for each row), `"sum"`, `"mean"`
            (weighed as the loss), `"last"`, or a pytree prefix of these.
        rng_argnum: An argument that is a key, or a pytree of keys: each micro-batch gets one that is split off. A batch
            that is a single micro-batch gets the key itself.
        state_argnum: An argument that is state, such as BatchNorm's statistics. `loss_fn` returns `(loss, new_state)`,
            or `(loss, (new_state, aux))` with `has_aux`, and the value is that, too. A micro-batch gets the state that
            the one before has returned.
        accumulate_dtype: The floating-point dtype that gradients and losses are summed in; default: their own, and
            float32 for narrower ones. What is returned has the dtype of the parameters.
        memory_limit: For `micro_batch_size="auto"`: bytes, or a string such as `"4GiB"`, the most that XLA may state
            for arguments, results and temporaries on a device. Default: what the device has free.
        noise_scale: Measure the gradient noise scale: a third result, after value and gradients, is the
            `gradaccum.core.noise.Norms` of this update, four numbers. `gradaccum.jax.noise_scale` estimates it from
            those of some updates, in a list or stacked by `lax.scan`.
        verify: Follow the loss while it is traced. If micro-batches certainly don't give the large batch's gradient,
            raise an error that names the cause and its line; if this can't be decided, log it.

    Raises:
        TypeError, ValueError: An option, the batch or what `loss_fn` returns isn't as described; when the function is
            traced, and with the argument's name.
        ValueError: `verify` finds that `loss_fn` is a sum, a mean over something else than declared, looks across the
            rows of the batch, or draws random numbers for them from an undeclared key.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss_fn(params, batch):
        ...     x, y = batch
        ...     return ((x @ params - y) ** 2).mean()
        >>> optimizer = optax.adam(1e-3)
        >>> grad_fn = value_and_grad(loss_fn, micro_batch_size=16)
        >>> @jax.jit
        ... def update(params, state, batch):
        ...     loss, grads = grad_fn(params, batch)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state, loss
        >>> params = jnp.zeros(3)
        >>> params, state, loss = update(params, optimizer.init(params), (jnp.ones((100, 3)), jnp.ones(100)))
        >>> float(loss)
        1.0
    """
    keywords = {name: given for name, given in locals().items() if name != "verify"}
    options = checked_options(**keywords, verification=Verification() if verify else None)
    accumulate = functools.partial(accumulated, accumulation_type=MeasuredAccumulation if noise_scale else Accumulation)
    auto = AutoSize(options.memory_limit, accumulate)

    def value_and_grad_of(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        call = Call(options, args, kwargs)
        if call.batch.devices > 1 and not call.is_traced:
            return call.compiled(value_and_grad_of)
        size = options.micro_batch_size
        return _computed(
            call, functools.partial(accumulate, micro_batch_size=auto.of(call) if size == "auto" else size)
        )

    return _named(value_and_grad_of, loss_fn)


def grad(
    loss_fn: Callable[Arguments, Any],
    *,
    micro_batch_size: int | Literal["auto"],
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    in_axes: Any = 0,
    weight: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    has_aux: bool = False,
    aux: Any = "concat",
    rng_argnum: int | None = None,
    state_argnum: int | None = None,
    accumulate_dtype: Any = None,
    memory_limit: int | str | None = None,
    noise_scale: bool = False,
    verify: bool = True,
) -> Callable[Arguments, Any]:
    """The gradients of `value_and_grad` alone, as `jax.grad`: `(gradients, aux)` with `has_aux`, or with a new state.

    With `noise_scale` the norms of this update come last.

    Args:
        loss_fn, micro_batch_size, argnums, batch_argnums, in_axes, weight, reduction: As for `value_and_grad`.
        has_aux, aux, rng_argnum, state_argnum, accumulate_dtype: As for `value_and_grad`.
        memory_limit, noise_scale, verify: As for `value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> grad(lambda w, x: ((x @ w) ** 2).mean(), micro_batch_size=2)(jnp.ones(3), jnp.ones((4, 3))).tolist()
        [6.0, 6.0, 6.0]
    """
    keywords = {name: given for name, given in locals().items() if name != "loss_fn"}
    both = value_and_grad(loss_fn, **keywords)

    def grad_of(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        value, *found = both(*args, **kwargs)
        if has_aux or state_argnum is not None:
            found.insert(1, value[1])
        return tuple(found) if len(found) > 1 else found[0]

    return _named(grad_of, loss_fn)


def _computed(call: Call, accumulate: Callable[[Call], Any]) -> Any:
    """The value and the gradients, in the structure that `jax.value_and_grad` gives them."""
    options, axes = call.options, data_axes(call) if call.batch.devices > 1 else ()
    losses, state, aux, gradients, norms = on_each_device(call, axes, accumulate) if axes else accumulate(call)
    value = losses.get("", losses)
    if options.state_argnum is not None:
        value = (value, (state, aux) if options.has_aux else state)
    elif options.has_aux:
        value = (value, aux)
    found = value, gradients if isinstance(options.argnums, tuple) else gradients[0]
    return (*found, norms) if options.noise_scale else found


def _named(function: Callable[Arguments, Any], loss_fn: Callable[Arguments, Any]) -> Callable[Arguments, Any]:
    """The function by the name of the loss, for profiles and tracebacks, and with its arguments, as of `jax.grad`."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    function.__name__ = function.__qualname__ = f"{function.__name__}_{name}"
    function.__wrapped__ = loss_fn  # type: ignore[attr-defined]  # as functools.wraps says whose signature it has
    return function
