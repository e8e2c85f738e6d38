"""Looks beyond the two numbers of rows that a loss is followed for: at numbers that are drawn, and at other rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from gradaccum.jax.loss.values import exponent

__all__ = ["differs", "is_alike"]

_IGNORED = (-1, -100)
"""Labels by which losses leave targets out."""
_ROUNDING = 1e-3
_HALF_ROUNDING = 5e-2
"""What a loss may be off by: what is wrong differs by more."""


def differs(
    half: ClosedJaxpr, whole: ClosedJaxpr, structure: Any, axes: list[int | None], wanted: list[bool], reduction: str
) -> bool:
    """Whether the loss of `whole`'s rows, or its gradient, isn't what `half` makes of each of their halves.

    False where it can't be told.

    Args:
        half, whole: The loss for n and for 2 n rows.
        structure: Of what they give: losses, weights, others.
        axes: Of their inputs, the axes of the rows.
        wanted: Which of them are differentiated.
        reduction: "mean" or "sum".
    """
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):
            programs = _program(half, structure, wanted), _program(whole, structure, wanted)
            for ignored, graded in ((None, False), *((each, False) for each in _IGNORED), (None, True)):
                if _differs(half, whole, programs, axes, reduction, ignored, graded):
                    return True
            return False
    except Exception:  # named axes of what it stands in, inputs that must be special
        return False


def _program(closed: Any, structure: Any, wanted: list[bool]) -> Any:
    """A function of constants and inputs that gives losses and weights, or gradients and weights, by name."""

    def evaluated(consts: list[Any], inputs: list[Any]) -> tuple[Any, Any]:
        outputs = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*inputs)
        losses, weights, _ = jax.tree.unflatten(structure, outputs)
        return losses, weights

    def gradients(consts: list[Any], inputs: list[Any]) -> tuple[Any, Any]:
        chosen = [n for n, each in enumerate(wanted) if each and jnp.issubdtype(inputs[n].dtype, jnp.floating)]

        def of(name: str) -> Any:
            def loss(given: list[Any]) -> Any:
                values = list(inputs)
                for n, value in zip(chosen, given):
                    values[n] = value
                return evaluated(consts, values)[0][name]

            return jax.grad(loss)([inputs[n] for n in chosen])

        losses, weights = evaluated(consts, inputs)
        return {name: of(name) for name in losses}, weights

    return jax.jit(evaluated), jax.jit(gradients)


def _differs(
    half: Any, whole: Any, programs: Any, axes: list[int | None], reduction: str, ignored: int | None, graded: bool
) -> bool:
    random = np.random.default_rng(0)
    inputs = [_drawn(random, kind, axis, ignored) for kind, axis in zip(whole.in_avals, axes, strict=True)]
    consts: list[list[Any]] = [[], []]
    for mine, other in zip(half.consts, whole.consts, strict=True):
        traced = isinstance(mine, jax.core.Tracer)
        drawn = _drawn(random, jax.typeof(other), None) if traced else None
        consts[0].append(drawn if traced else mine)
        consts[1].append(drawn if traced else other)
    halves = [[x if axis is None else jnp.split(x, 2, axis)[part] for x, axis in zip(inputs, axes)] for part in (0, 1)]
    run_half, run_whole = (program[graded] for program in programs)
    at_once, _ = run_whole(consts[1], inputs)
    parts = [run_half(consts[0], each) for each in halves]
    for name in at_once:
        weights = [1.0 if reduction == "sum" else float(weights.get(name, 0.5)) for _, weights in parts]
        divisor = 1.0 if reduction == "sum" else sum(weights)
        if not divisor:
            continue
        expected = _vector(at_once[name])
        vectors = [_vector(found[name]) for found, _ in parts]
        found = sum(weight * vector for weight, vector in zip(weights, vectors)) / divisor
        scale = max(np.abs(each).max(initial=0.0) for each in (expected, *vectors))
        finite = np.isfinite(expected).all() and np.isfinite(found).all()
        if finite and np.abs(found - expected).max(initial=0.0) > _allowed(whole) * scale:
            return True
    return False


def _vector(tree: Any) -> np.ndarray:
    leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def _allowed(closed: Any) -> float:
    kinds = {str(v.aval.dtype) for e in closed.jaxpr.eqns for v in e.outvars if hasattr(v.aval, "dtype")}
    return _HALF_ROUNDING if kinds & {"bfloat16", "float16"} else _ROUNDING


def _drawn(random: np.random.Generator, kind: Any, axis: int | None, ignored: int | None = None) -> Any:
    """Numbers that any loss can do with, positive ones and small integers, and larger ones in later rows."""
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        key = jax.random.key(int(random.integers(1 << 30)), impl=jax.random.key_impl(kind))
        return jax.random.split(key, kind.shape)
    growing: Any = 1.0
    if axis is not None:
        length = [kind.shape[axis] if n == axis else 1 for n in range(len(kind.shape))]
        growing = np.linspace(0.2, 1.8, kind.shape[axis]).reshape(length)
    numbers = random.uniform(0.1, 1.0, kind.shape)
    if not jnp.issubdtype(kind.dtype, jnp.inexact):
        is_label = axis is not None and jnp.issubdtype(kind.dtype, jnp.signedinteger)
        least = ignored if is_label and ignored is not None else 0
        return jnp.asarray(np.where(numbers * growing > 0.5, 1, least), kind.dtype)
    if axis is None and len(kind.shape) > 1:
        numbers = numbers * random.choice([-1, 1], kind.shape) / np.sqrt(np.prod(kind.shape[:-1]))
    return jnp.asarray(numbers * growing, kind.dtype)


_LAYOUT = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
"""What a single row needs none of."""


def is_alike(first: ClosedJaxpr, second: ClosedJaxpr, third: ClosedJaxpr, rows: tuple[int, int]) -> bool:
    """Whether a loss does the same for other rows.

    Its operations are the same, and so are its numbers, or they go with the power of the rows that they go with from
    the first to the second.

    Args:
        first, second: For some rows, and for twice as many.
        third: For others.
        rows: The rows of `first` and `third`.
    """
    traces = [list(_done(closed.jaxpr, closed.consts)) for closed in (first, second, third)]
    if len({len(trace) for trace in traces}) > 1:
        return False
    for one, two, three in zip(*traces):
        if isinstance(one, str) or isinstance(three, str):
            if one != three:
                return False
            continue
        degree = exponent(one, two, 2)
        expected = one if degree is None else one * (rows[1] / rows[0]) ** float(degree)
        if degree is not None and three != expected and abs(three - expected) > 1e-5 * abs(expected):
            return False
    return True


def _done(jaxpr: Any, consts: Any) -> Any:
    """The names of a jaxpr's operations, and the numbers that are written down in it."""
    yield from (number for const in consts for number in _number(const))
    for equation in jaxpr.eqns:
        if equation.primitive.name in _LAYOUT:
            continue
        yield equation.primitive.name
        for variable in equation.invars:
            if isinstance(variable, Literal):
                yield from _number(variable.val)
        for name, value in sorted(equation.params.items()):
            if name in ("y", "k", "reverse", "exponent"):
                yield float(value) if isinstance(value, int | float) else str(value)
            for each in value if isinstance(value, tuple | list) else [value]:
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from _done(getattr(each, "jaxpr", each), getattr(each, "consts", ()))


def _number(value: Any) -> Any:
    if not isinstance(value, jax.core.Tracer) and np.size(value) == 1 and _is_real(value):
        number = float(np.asarray(value).item())
        if np.isfinite(number):
            yield number


def _is_real(value: Any) -> bool:
    return any(jnp.issubdtype(jnp.result_type(value), kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
