"""A look at what the loss computes, when it is traced: is it a mean over its rows, or whatever was said of it?"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum.jax.batch import spread
from gradaccum.jax.loss import DIFFERENTIATED, FRESH, STATE, LossSpec, Verdict, judge
from gradaccum.jax.train_step.call import Call
from gradaccum.jax.train_step.options import checked_options

logger = logging.getLogger("gradaccum")

_exact: weakref.WeakSet[Any] = weakref.WeakSet()
"""The losses that `check_equivalence` found exact."""


def known_exact(loss_fn: Any) -> None:
    """Remember that this loss is exact: it needs no warning."""
    with contextlib.suppress(TypeError):  # it has no hash, or no weak references
        _exact.add(getattr(loss_fn, "__func__", loss_fn))


class Verification:
    """What one `value_and_grad` has seen of its loss."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._has_warned = False

    def look(self, call: Call, sizes: tuple[int, ...]) -> None:
        """Look at the loss of a call, whose micro-batches have these rows, once for each set of shapes."""
        key = call.shapes(), sizes
        if key in self._seen:
            return
        verdict = judge(_spec(call, sizes))
        if verdict.certain and verdict.kind not in ("exact", "batch_norm"):
            raise ValueError(
                f"Micro-batches would not give the large batch's gradient of loss_fn. {verdict.message} To use them "
                "anyway, pass verify=False."
            )
        if verdict.kind != "exact":
            self._warn(call.options.loss_fn, verdict)
        self._seen.add(key)

    def _warn(self, loss_fn: Any, verdict: Verdict) -> None:
        with contextlib.suppress(TypeError):  # it has no hash, or no weak references
            self._has_warned = self._has_warned or getattr(loss_fn, "__func__", loss_fn) in _exact
        if self._has_warned:
            return
        self._has_warned = True
        if verdict.kind in ("batch_norm", "state", "aux"):
            logger.warning("gradaccum.jax: %s verify=False turns this message off.", verdict.message)
        else:
            logger.warning(
                "gradaccum.jax: whether micro-batches give the large batch's gradient can't be decided from loss_fn. "
                "%s Call gradaccum.jax.check_equivalence(loss_fn, params, batch, ...); it turns this message off, as "
                "verify=False does.",
                verdict.message,
            )


def judge_loss(loss_fn: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Verdict:
    """What is seen of a loss with these arguments and keywords of `value_and_grad`."""
    given = dict.fromkeys(("rng_argnum", "accumulate_dtype", "memory_limit"))
    given |= {"micro_batch_size": 1, "noise_scale": False, **keywords}
    return judge(_spec(Call(checked_options(loss_fn, verification=None, **given), args, {})))


def _spec(call: Call, sizes: tuple[int, ...] = ()) -> LossSpec:
    """A call as what is judged: its batch, its parameters, state and keys are inputs."""
    options = call.options
    leaves, axes, _ = call.leaves()
    numbers = [n for n, arg in enumerate(call.args) for _ in jax.tree.leaves(arg)]
    fresh = {options.rng_argnum, options.state_argnum} - {None}
    roles = {*options.differentiated, *options.batches, *fresh}
    inputs = [position for position, number in enumerate(numbers) if number in roles]
    paths = jax.tree_util.tree_flatten_with_path(call.state)[0]
    names = [f"state{jax.tree_util.keystr(path)}" for path, _ in paths]
    bits, roots = iter(STATE << n for n in range(len(names))), []
    for number in (numbers[position] for position in inputs):
        role = DIFFERENTIATED if number in options.differentiated else FRESH if number in fresh else 0
        roots.append(role | (next(bits) if number == options.state_argnum else 0))

    def function(values: list[Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        args = [*call.filled(inputs, values)[0]]
        weights = {} if options.weight is None else {"": call.weight(args)}
        outcome = call.outcome(args)
        return outcome.losses, outcome.weights or weights, _more(call, outcome, names)

    def kinds(rows: int) -> list[Any]:
        def resized(position: int) -> Any:
            leaf, axis = jnp.asarray(leaves[position]), axes[position]
            if axis is None:
                return leaf
            whole = jnp.concatenate([leaf] * -(-rows // leaf.shape[axis]), axis)
            return jax.lax.slice_in_dim(whole, 0, rows, axis=axis)

        return jax.eval_shape(lambda: [resized(position) for position in inputs])

    of_inputs = [axes[position] for position in inputs]
    return LossSpec(function, kinds, of_inputs, roots, options.reduction, call.batch.devices, sizes)


def _more(call: Call, outcome: Any, names: list[str]) -> dict[str, Any]:
    """What comes with the loss: what moves (the state, and means in its aux that are no single numbers), and aux."""
    state = jax.tree.leaves(outcome.state)
    aux: dict[tuple[str, str], Any] = {}
    if call.options.has_aux:
        hows = spread(call.options.aux, outcome.aux, "aux", "the aux of loss_fn")
        leaves, _ = jax.tree_util.tree_flatten_with_path(outcome.aux)
        aux = {(how, jax.tree_util.keystr(path)): leaf for (path, leaf), how in zip(leaves, hows)}
    moving = [*state, *(leaf for (how, _), leaf in aux.items() if how != "concat" and jnp.ndim(leaf))]
    return {
        "statistics": [x for x in moving if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)],
        "state": {(name, STATE << n): leaf for n, (name, leaf) in enumerate(zip(names, state))},
        "aux": {key: leaf for key, leaf in aux.items() if key[0] != "last"},
        "gradients": {},
    }
