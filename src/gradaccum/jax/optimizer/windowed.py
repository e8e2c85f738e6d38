"""`windowed`: an optax optimizer that makes one update per window of micro-batches."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum.core.window import checked_weight, counted, is_full
from gradaccum.jax.batch import NEED_VALUES, zeros
from gradaccum.jax.optimizer.state import (
    WindowedState,
    add_micro_batch,
    close_window,
    empty_noise,
    refuse_accumulating,
)  # fmt: skip
from gradaccum.schedule import Schedule, Steps

_OVERWRITTEN = "_overwrite_with_gradient"
"""Flax' name for parameters that are replaced by their gradients: the scales and largest values of float8."""


class WindowedOptimizer(optax.GradientTransformationExtraArgs):
    """What `windowed` returns: an `optax.GradientTransformationExtraArgs` with one more function, `flush`."""

    flush: Callable[..., tuple[Any, WindowedState]]


def windowed(
    optimizer: optax.GradientTransformation,
    steps: Steps,
    *,
    accumulate_dtype: Any = None,
    noise_scale: bool = False,
) -> WindowedOptimizer:
    """An optimizer for loops that run small batches: one update of `optimizer` per window of micro-batches.

        sum_i w_i g_i / sum_i w_i,      the gradient of the large batch's mean loss

    It is an optax transformation: `init(params)`, `update(grads, state, params, weight=None, **extra)`, both for inside
    `jax.jit`. `weight` is what this micro-batch's mean loss is a mean over: rows, or valid tokens. Without weights,
    micro-batches weigh the same. Weight 0 leaves the micro-batch out, even if its gradient is NaN. A micro-batch that
    does not close its window gives updates of zero. The inner optimizer runs once per window, inside `lax.cond`, so its
    schedules, momentum, clipping and weight decay see the window's mean gradient and nothing else. A window of weight 0
    makes no update.

    `flush(state, params, **extra)` returns what `update` does, closes a short window and ends the epoch. Call it at
    each epoch's end, or the rest joins the next epoch's first window, and `{epoch: steps}` stays in epoch 0.

    Args:
        optimizer: Any optax optimizer. Put clipping and other edits of the finished gradient inside.
        steps: Micro-batches of a window: an int, `{epoch: steps}`, or a callable `(epoch, update) -> steps`, which gets
            traced numbers inside jit. A window keeps the length that it opened with.
        accumulate_dtype: The dtype that gradients are summed in: `float32` or `float64`, never narrower than their own.
            None: their own, and float32 for half precision.
        noise_scale: Measure the gradient noise scale; `gradaccum.jax.noise_scale(state)` estimates it.

    `extra` goes to the inner optimizer with the call that closes the window; for `value`, the loss, it gets the
    window's mean.

    Raises:
        TypeError: `optimizer` is no optax optimizer, or `steps` is of a wrong type; when called, a gradient is of
            another dtype than its parameter.
        ValueError: `steps` is below 1, or has no epoch 0; the inner optimizer accumulates by itself, or evaluates the
            loss again; when called, gradients don't fit the parameters, a weight is negative or not finite, or some
            micro-batches of a window have a weight and others none. If the weight, the state or a callable's steps are
            traced, the update becomes NaN instead.

    Example:
        >>> optimizer = windowed(optax.adam(1e-3), steps=4)
        >>> params = {"w": jnp.ones(3)}
        >>> state = optimizer.init(params)
        >>> @jax.jit
        ... def train_step(params, state, x):
        ...     grads = jax.grad(lambda params: ((x @ params["w"]) ** 2).mean())(params)
        ...     updates, state = optimizer.update(grads, state, params, weight=len(x))
        ...     return optax.apply_updates(params, updates), state
        >>> for x in jnp.ones((10, 2, 3)):
        ...     params, state = train_step(params, state, x)
        >>> updates, state = optimizer.flush(state, params)         # the last two
        >>> params = optax.apply_updates(params, updates)
        >>> int(state.updates)
        3
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"`optimizer` must be an optax.GradientTransformation, such as optax.adam(1e-3). Received: "
            f"optimizer={optimizer!r} of type {type(optimizer).__name__}."
        )
    window = _Window(optimizer, Schedule(steps), _checked_dtype(accumulate_dtype), noise_scale)
    made = WindowedOptimizer(window.init, window.update)
    made.flush = window.flush
    return made


class _Window:
    """The three functions, over what the user chose."""

    def __init__(self, optimizer: Any, schedule: Schedule, dtype: Any, noise_scale: bool) -> None:
        self.inner = optax.with_extra_args_support(optimizer)
        self.schedule, self.dtype, self.noise_scale = schedule, dtype, noise_scale

    def init(self, params: Any) -> WindowedState:
        inner_state = self.inner.init(params)
        refuse_accumulating(inner_state)
        real = jnp.result_type(float)
        return WindowedState(
            inner_state=inner_state,
            sums=jax.tree_util.tree_map_with_path(self._empty_sum, _differentiated(params)),
            weight=jnp.zeros((), real),
            weighed=jnp.zeros((), bool),
            micro_batches=jnp.zeros((), jnp.int32),
            steps=jnp.ones((), jnp.int32),
            epoch=jnp.zeros((), jnp.int32),
            updates=jnp.zeros((), jnp.int32),
            updated=jnp.zeros((), bool),
            value_sum=jnp.zeros((), real),
            value_weight=jnp.zeros((), real),
            noise=empty_noise() if self.noise_scale else None,
        )

    def update(
        self, grads: Any, state: WindowedState, params: Any = None, weight: Any = None, **extra: Any
    ) -> tuple[Any, WindowedState]:
        self._check_extra(extra)
        _check_state(state)
        grads = _fitting(grads, state.sums, _differentiated(params))
        factor, counts = _weight(weight, state.weight.dtype)
        is_first = state.micro_batches == 0
        opened = _steps_of(self.schedule, state.epoch, state.updates)
        # What can't be refused, as it is traced, makes the update NaN.
        factor = jnp.where(_mixed(state, weight is not None) | (is_first & (opened < 1)), jnp.nan, factor)
        sums = jax.tree.map(
            # A new window begins by assignment: a NaN of the last one must not survive as 0 * NaN.
            lambda total, g: (
                g if total is None else _add(jnp.where(is_first, jnp.zeros_like(total), total), g, factor, counts)
            ),
            state.sums,
            grads,
            is_leaf=_is_none,
        )
        noise = state.noise
        if noise is not None:
            noise = add_micro_batch(noise, grads, factor, weight is not None)
        if "value" in extra:
            value = jnp.asarray(extra["value"])
            if value.shape:
                raise ValueError(
                    f"`value` must be the micro-batch's mean loss, a scalar. Received: shape {value.shape}."
                )
            state = state._replace(
                value_sum=_add(state.value_sum, value, factor, counts), value_weight=state.value_weight + factor
            )
        state = counted(
            state,
            factor,
            sums=sums,
            weighed=jnp.full_like(state.weighed, weight is not None),
            steps=jnp.where(is_first, opened, state.steps).astype(jnp.int32),
            noise=noise,
        )
        like = _differentiated(params)
        if params is None:
            like = jax.tree.map(lambda g, total: total if g is None else g, grads, state.sums, is_leaf=_is_none)
        return self._close_if(is_full(state), state, params, like, extra)

    def flush(self, state: WindowedState, params: Any, **extra: Any) -> tuple[Any, WindowedState]:
        """Close the short window, if one is open, and end the epoch."""
        _check_state(state)
        self._check_extra(extra)
        close = functools.partial(self._close_if, jnp.ones((), bool), state, params, _differentiated(params))
        try:
            updates, state = close({"value": None, **extra})  # whatever values there are in the window, their mean
        except TypeError as error:
            if "value" in extra or "unexpected keyword argument 'value'" not in str(error):
                raise
            updates, state = close(extra)
        return updates, state._replace(epoch=state.epoch + 1)

    def _close_if(
        self, closes: jax.Array, state: WindowedState, params: Any, like: Any, extra: dict[str, Any]
    ) -> tuple[Any, WindowedState]:
        """Updates and state, after an update if the window closes and weighs something; `like` has the dtypes."""
        makes = closes & (state.weight != 0)  # a weight that is NaN makes the update NaN: nothing hides it
        if "value" in extra:
            value = state.value_sum / state.value_weight
            extra = extra | {
                "value": value if extra["value"] is None else value.astype(jnp.asarray(extra["value"]).dtype)
            }

        def update() -> tuple[Any, Any, Any]:
            mean = jax.tree.map(
                lambda total, g: (
                    None if total is None else (total / state.weight.astype(total.dtype)).astype(jnp.result_type(g))
                ),
                state.sums, like, is_leaf=_is_none,
            )  # fmt: skip
            updates, inner_state = self._inner_update(mean, state.inner_state, params, extra)
            noise = None if state.noise is None else close_window(state.noise, mean, state.weight)
            return updates, inner_state, noise

        def wait() -> tuple[Any, Any, Any]:
            updates, _, _ = jax.eval_shape(update)
            return jax.tree.map(zeros, updates), state.inner_state, state.noise

        if isinstance(makes, jax.core.Tracer):
            updates, inner_state, noise = jax.lax.cond(makes, update, wait)
        else:  # outside of jit each cond would be compiled anew
            updates, inner_state, noise = update() if makes else wait()
        of_the_window = {
            name: getattr(state, name) for name in ("weight", "micro_batches", "value_sum", "value_weight")
        }
        empty = jax.tree.map(lambda number: jnp.where(closes, jnp.zeros_like(number), number), of_the_window)
        state = state._replace(inner_state=inner_state, noise=noise, updates=state.updates + makes, updated=makes)
        return updates, state._replace(**empty)

    def _inner_update(self, mean: Any, inner_state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        try:
            updates, new = self.inner.update(mean, inner_state, params, **extra)
        except TypeError as error:
            missing = re.search(r"missing .* arguments?: (.*)", str(error))
            names = [name for name in re.findall(r"'(\w+)'", missing[1]) if name not in extra] if missing else []
            if not names:
                raise
            self._check_extra(dict.fromkeys(names))
            name = names[0]
            raise TypeError(
                f"The inner optimizer needs `{name}`. Pass it with every micro-batch, update(grads, state, params, "
                f"{name}=...): only the compiled program knows which one closes the window."
            ) from error
        structures = [jax.tree.structure(tree) for tree in (inner_state, new)]
        if structures[0] != structures[1]:
            raise ValueError(
                "The inner optimizer's update must return a state of the structure that it got, because micro-batches "
                f"that don't close a window keep it. Received: another structure, {structures[1]}; expected: "
                f"{structures[0]}. Leave such a part out (optax.monitor), or put it around windowed()."
            )
        return updates, jax.tree.map(lambda each, old: jnp.asarray(each, jnp.result_type(old)), new, inner_state)

    def _empty_sum(self, path: Any, leaf: Any) -> jax.Array:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"Parameters must be floating or complex numbers. Received: params{jax.tree_util.keystr(path)} of "
                f"{dtype}. Keep it out of `params`, as with optax.masked around, or equinox.partition."
            )
        if any(getattr(key, "key", None) == _OVERWRITTEN for key in path):
            raise ValueError(
                "windowed() divides sums of gradients, but those of Flax' float8 layers are the parameters' next "
                f"values, of which a window needs the largest. Received: params{jax.tree_util.keystr(path)}. Pass "
                "params['params'] alone, and take jnp.maximum of the others over the window's micro-batches."
            )
        return jnp.zeros_like(leaf, dtype=jnp.promote_types(dtype, self.dtype))

    def _check_extra(self, extra: dict[str, Any]) -> None:
        if self.schedule.constant == 1:
            return
        for name, value in extra.items():
            if callable(value) or name in ("grad", "value_fn"):
                raise ValueError(
                    f"`{name}` covers one micro-batch only, but the update is the window's. An inner optimizer that "
                    "evaluates the loss again (a line search, SAM) needs the whole large batch: use "
                    "gradaccum.jax.value_and_grad with it."
                )


def _differentiated(params: Any) -> Any:
    """The parameters that have gradients: `optax.lookahead` gets slow ones, too."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _add(total: jax.Array, number: Any, weight: jax.Array, counts: jax.Array | None) -> jax.Array:
    """`total + weight * number`; `total` itself where the micro-batch does not count, whatever its number is."""
    if number is None:
        return total
    added = total + number.astype(total.dtype) * weight.astype(total.dtype)
    return added if counts is None else jnp.where(counts, added, total)


def _mixed(state: WindowedState, given: bool) -> jax.Array:
    """Whether this window's other micro-batches came with weights, and this one does not; or the other way round."""
    mixed = (state.micro_batches > 0) & (state.weighed != given)
    if not isinstance(mixed, jax.core.Tracer) and mixed:
        raise ValueError(
            "All micro-batches of a window must come with a `weight`, or none: one without would count as 1 row or "
            f"token among them. Received: {'a' if given else 'no'} weight, after {int(state.micro_batches)} "
            f"micro-batches {'without' if given else 'with'} one."
        )
    return mixed


def _weight(weight: Any, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """The weight, NaN in place of a negative one that is traced, and whether the micro-batch counts; None: it does."""
    if weight is None:
        return jnp.ones((), dtype), None
    if not isinstance(weight, jax.core.Tracer):
        number = checked_weight(weight)
        return jnp.asarray(number, dtype), jnp.asarray(number > 0)
    if weight.shape or not (jnp.issubdtype(weight.dtype, jnp.floating) or jnp.issubdtype(weight.dtype, jnp.integer)):
        raise TypeError(
            f"A weight must be a finite number >= 0. Received: weight={weight.dtype}{list(weight.shape)}, traced."
        )
    weight = weight.astype(dtype)
    return jnp.where(weight >= 0, weight, jnp.nan), weight > 0


def _check_state(state: Any) -> None:
    if not hasattr(state, "sums"):
        raise TypeError(
            "`state` must be what init(params) or the last update() of this optimizer returned, not its inner "
            f"optimizer's. Received: state of type {type(state).__name__}."
        )
    if type(state.weight).__module__.startswith("flax."):
        raise TypeError(
            "`state` must hold arrays, as update() gets them. Received: the variables of Flax NNX. Call "
            "flush(nnx.as_pure(optimizer.opt_state), nnx.as_pure(nnx.state(model, nnx.Param))), add the updates, and "
            "write parameters and state back by nnx.update(...)."
        )


def _fitting(grads: Any, sums: Any, params: Any) -> Any:
    """Gradients in the structure of the sums, with None for those that are left out."""
    named, structure = jax.tree_util.tree_flatten_with_path(sums, is_leaf=_is_none)
    found, received = jax.tree.flatten(grads, is_leaf=_is_none)
    if structure != received:
        raise ValueError(
            "Gradients must have the structure of the parameters that init() got, with arrays or None as leaves. "
            f"Received: {received}; expected: {structure}."
        )
    leaves = jax.tree.leaves(params, is_leaf=_is_none)
    dtypes = [jnp.result_type(p) if hasattr(p, "dtype") else None for p in leaves] if len(leaves) == len(named) else []
    for i, ((path, total), g) in enumerate(zip(named, found)):
        where = f"grads{jax.tree_util.keystr(path)}"
        if g is None:
            continue
        if total is None or jnp.shape(g) != total.shape:
            expected = "None, as init() got" if total is None else f"shape {total.shape}"
            raise ValueError(
                f"Gradients must fit the parameters. Received: {where} of shape {jnp.shape(g)}, not {expected}."
            )
        if dtypes and dtypes[i] is not None and jnp.result_type(g) != dtypes[i]:
            raise TypeError(
                f"Gradients must have their parameters' dtype, as jax.grad gives them: a short window has no other "
                f"way to know it. Received: {where} of {jnp.result_type(g)} for a parameter of {dtypes[i]}. Cast it."
            )
    return jax.tree.unflatten(structure, [g if g is None else jnp.asarray(g) for g in found])


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _checked_dtype(dtype: Any) -> Any:
    if dtype is None:
        return jnp.float32
    if jnp.dtype(dtype) not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"`accumulate_dtype` must be float32 or float64: sums in half precision lose what they add. Received: "
            f"accumulate_dtype={dtype!r}."
        )
    return jnp.dtype(dtype)


def _steps_of(schedule: Schedule, epoch: jax.Array, update: jax.Array) -> jax.Array:
    """The steps of the window that opens in this epoch, after so many updates: an int32 scalar."""
    if schedule.function is None:
        starts, steps = np.array(schedule.to_pairs(), np.int32).T
        return jnp.asarray(steps)[jnp.searchsorted(jnp.asarray(starts), epoch, side="right") - 1]
    try:
        steps = schedule.function(epoch, update)
    except NEED_VALUES as error:
        raise TypeError(
            "Inside jit, a callable `steps` gets `epoch` and `update` as traced arrays, and this one needs their "
            "values. Write it in jax.numpy, as in lambda epoch, update: jnp.where(update < 100, 1, 4)."
        ) from error
    if isinstance(steps, jax.core.Tracer):
        if steps.shape or not jnp.issubdtype(steps.dtype, jnp.integer):
            received = f"{steps.dtype}{list(steps.shape)} from the callable"
            raise TypeError(f"A callable `steps` must return an int >= 1. Received: {received}.")
        return steps.astype(jnp.int32)
    if isinstance(steps, (jax.Array, np.ndarray)) and steps.ndim == 0:
        steps = steps.item()
    return jnp.asarray(Schedule(lambda epoch, update: steps)(), jnp.int32)
