"""Operations that hold jaxprs: calls, loops and branches."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from gradaccum.jax.loss.values import FINITE, LIFTED, ONE, CannotTell, Known, MixesRows, Place, Symbol, Term
from gradaccum.jax.loss.walk import CALLS, Equation, Lost, Rule, Value, Walk, is_ours, joined

__all__ = ["NESTED_RULES"]

_ROUNDS = 6
"""Times that a loop's body is looked at until what is known of its carry stays."""


def _opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _run(walk: Walk, first: Any, second: Any, inputs: list[Value]) -> list[Value]:
    (one, consts), (other, other_consts) = _opened(first), _opened(second)
    return walk.run(one, other, (consts, other_consts), inputs)


def _called(walk: Walk, equation: Equation, inputs: list[Value]) -> list[Value]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            walk.callers.append((equation.params.get("name", ""), equation.source.info))
            try:
                return _run(walk, equation.params[name], equation.other_params[name], inputs)
            finally:
                walk.callers.pop()
    raise CannotTell(equation.name)


def _with_own_derivative(walk: Walk, equation: Equation, inputs: list[Value]) -> list[Value]:
    """`custom_vjp` and `custom_jvp`: forward, and what they do with the gradients of their outputs.

    These are another factor in each micro-batch: a gradient must be multiplied by it once, row by row.
    """
    outputs = _called(walk, equation, inputs)
    jaxpr, _ = _opened(equation.params["call_jaxpr"])
    where = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    before, after = ([value for value in some if isinstance(value, Known)] for some in (inputs, outputs))
    if is_ours(where.rpartition(" at ")[2]) or len(before) < len(inputs) or len(after) < len(outputs):
        return outputs
    if walk.is_derivative:
        return outputs
    wanted, given = (
        [n for n, variable in enumerate(some) if jnp.issubdtype(variable.aval.dtype, jnp.floating)]
        for some in (equation.traced[0].invars, equation.traced[0].outvars)
    )
    wanted = [n for n in wanted if not (before[n].free or isinstance(equation.traced[0].invars[n], Literal))]
    given = [n for n in given if type(equation.traced[0].outvars[n]).__name__ != "DropVar"]
    if not wanted or not given:
        return outputs
    one, other = (_pullback(traced, wanted, given) for traced in equation.traced)
    factor = Symbol(walk.number("gradient", id(equation.traced[0])), "mixed", False, True)
    each = frozenset([(factor, Fraction(1))])
    gradients = [
        Known(frozenset([Term(True, each)]), after[n].place, walk.number(factor, n), free=False) for n in given
    ]
    walk.is_derivative = True
    try:
        found = walk.run(one.jaxpr, other.jaxpr, (one.consts, other.consts), [*before, *gradients])
    finally:
        walk.is_derivative = False
    for n, gradient in zip(wanted, found):
        if isinstance(gradient, Lost):
            why = f"its derivative: {gradient.message or gradient.source.primitive}"
            return [gradient._replace(source=equation.source, message=why)] * len(outputs)
        allowed = {Term(True, each), Term(False, ONE)} if before[n].place is None else {Term(True, each)}
        if not gradient.terms <= allowed or (gradient.terms and gradient.place != before[n].place):
            return [Lost(True, equation.source)] * len(outputs)
    return outputs


def _pullback(traced: Any, wanted: list[int], given: list[int]) -> Any:
    """From inputs and the gradients of these outputs to the gradients of these inputs."""
    variables = [v for v in dict.fromkeys(v for v in traced.invars if not isinstance(v, Literal))]
    debug_info = traced.params["call_jaxpr"].jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    alone = Jaxpr((), variables, [traced.outvars[n] for n in given], [traced], traced.effects, debug_info)
    run = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def function(values: list[Any], gradients: list[Any]) -> Any:
        mine = {v: value for v, value in zip(traced.invars, values) if not isinstance(v, Literal)}

        def chosen(some: list[Any]) -> list[Any]:
            changed = {traced.invars[n]: value for n, value in zip(wanted, some)}
            return run(*({**mine, **changed}[v] for v in variables))

        return jax.vjp(chosen, [values[n] for n in wanted])[1](gradients)[0]

    kinds = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in some] for some in (traced.invars, traced.outvars)
    ]
    return jax.make_jaxpr(function)(kinds[0], [kinds[1][n] for n in given])


def _settled_carry(walk: Walk, equation: Equation, body: Any, carry: list[Value]) -> tuple[list[Value], list[Value]]:
    """What is known of the carry in any round, and of what a round gives."""
    carry = [value.but(values=None, position=False) if isinstance(value, Known) else value for value in carry]
    for _ in range(_ROUNDS):
        found = body(carry)
        after = [_widened(joined(walk, *pair), equation) for pair in zip(carry, found)]
        alike = [_known(a) == _known(b) for a, b in zip(carry, after)]
        carry = [a if same else b for a, b, same in zip(carry, after, alike)]
        if all(alike):
            return carry, found
    raise CannotTell(equation.name)


def _known(value: Value) -> Any:
    if not isinstance(value, Known):
        return value
    return value.terms, value.place, value.fresh, value.free, value.state, value.doubts


def _widened(value: Value, equation: Equation) -> Value:
    """In a loop each round would make symbols of its own."""
    if isinstance(value, Known):
        for term in value.terms:
            for symbol, _ in term.factor:
                if symbol.kind in ("mixed", "sum"):
                    return Lost(True, symbol.source or equation.source, "", symbol.origin)
    return value


def _scanned(walk: Walk, equation: Equation, inputs: list[Value]) -> list[Value]:
    params = equation.params
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, xs = inputs[:first], inputs[first:second], inputs[second:]
    entries = [_entry(value) for value in xs]
    over_rows = any(isinstance(value, Known) and value.place == LIFTED for value in entries)
    if not over_rows and params["length"] != equation.other_params["length"]:
        raise CannotTell(f"{params['length']} rounds for {walk.rows[0]} rows")

    def body(carry: list[Value]) -> list[Value]:
        return _run(walk, params["jaxpr"], equation.other_params["jaxpr"], [*consts, *carry, *entries])

    if over_rows and carry and params["num_carry"]:
        shared = all(isinstance(value, Known) and value.is_shared for value in carry)
        found = body(carry)
        still = all(isinstance(v, Known) and v.is_shared and v.place is None for v in found[: len(carry)])
        if not (shared and still):
            raise CannotTell("scan over rows")
        return [*found[: len(carry)], *(_stacked(value) for value in found[len(carry) :])]
    carry, found = _settled_carry(walk, equation, lambda carry: body(carry)[: len(carry)], carry)
    found = body(carry)
    return [*carry, *(_stacked(value) for value in found[len(carry) :])]


def _entry(value: Value) -> Value:
    """What one round of a scan gets of an array."""
    if isinstance(value, Lost):
        return value
    value = value.but(values=None, position=False, parts=None)
    if value.place is None or value.place == LIFTED:
        return value
    if value.place.axis == 0:
        if value.place[1:] != (1, 1):
            raise CannotTell("scan over parts of the rows")
        return value.but(place=LIFTED)
    return value.but(place=value.place._replace(axis=value.place.axis - 1))


def _stacked(value: Value) -> Value:
    """What a scan makes of what its rounds give."""
    if isinstance(value, Lost) or value.place is None:
        return value if isinstance(value, Lost) else value.but(scalar=False, values=None, position=False)
    if value.place == LIFTED:
        return value.but(place=Place(0), scalar=False)
    return value.but(place=value.place._replace(axis=value.place.axis + 1), scalar=False, position=False)


def _looped(walk: Walk, equation: Equation, inputs: list[Value]) -> list[Value]:
    params, other = equation.params, equation.other_params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, consts, carry = inputs[:first], inputs[first:second], inputs[second:]
    carry, _ = _settled_carry(
        walk, equation, lambda carry: _run(walk, params["body_jaxpr"], other["body_jaxpr"], [*consts, *carry]), carry
    )
    (goes_on,) = _run(walk, params["cond_jaxpr"], other["cond_jaxpr"], [*condition, *carry])
    if isinstance(goes_on, Lost) or not goes_on.is_shared:
        raise CannotTell("while")
    return carry


def _branched(walk: Walk, equation: Equation, inputs: list[Value]) -> list[Value]:
    which, *rest = inputs
    if isinstance(which, Lost):
        if which.mixed:
            raise MixesRows("cond")
        raise CannotTell("cond")
    pairs = list(zip(equation.params["branches"], equation.other_params["branches"], strict=True))
    if which.values is not None and which.values[0] == which.values[1]:
        return _run(walk, *pairs[int(which.values[0])], rest)
    if not (which.guard or which.is_shared):
        raise CannotTell("cond")
    found = [_run(walk, one, other, list(rest)) for one, other in pairs]
    known = [value for each in found for value in each if isinstance(value, Known) and value.values is None]
    guards = known and (which.guard == FINITE or all(value.divides(which.guard) for value in known))
    if which.guard and not guards:
        raise MixesRows("cond")
    result = found[0]
    for each in found[1:]:
        result = [joined(walk, *pair) for pair in zip(result, each, strict=True)]
    return [
        value.but(state=value.state | which.state, doubts=value.doubts | which.doubts)
        if isinstance(value, Known)
        else value
        for value in result
    ]


NESTED_RULES: dict[str, Rule] = {
    **dict.fromkeys(CALLS, _called),
    **{name: _with_own_derivative for name in CALLS if name.startswith("custom_")},
    "scan": _scanned,
    "while": _looped,
    "cond": _branched,
}
