"""What calls, loops, branches and other primitives that hold jaxprs make of the rows; they take what is lost, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from gradaccum.jax.loss.domain import (
    FINITE,
    LIFTED,
    NAN,
    SHARED,
    CannotTell,
    Lost,
    MixesRows,
    Symbol,
    Value,
    of,
    symbols_of,
)
from gradaccum.jax.loss.interpreter import Equation, Interpreter, Known, Rule, is_ours, joined

__all__ = ["NESTED_RULES"]

_ROUNDS = 6
"""Times that a loop's body is looked at until what is known of its carry stays."""


def _called(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            walk.callers.append((equation.params.get("name", ""), equation.source.info))
            try:
                return walk.run(equation.params[name], equation.other_params[name], inputs)
            finally:
                walk.callers.pop()
    raise CannotTell(equation.name)


def _with_own_derivative(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    """`custom_vjp` and `custom_jvp`: forward, and what they do with the gradients of their outputs.

    These are another factor in each micro-batch: a gradient must be multiplied by it once, row by row.
    """
    outputs = _called(walk, equation, inputs)
    before, after = ([value for value in some if isinstance(value, Value)] for some in (inputs, outputs))
    where = getattr(getattr(equation.params["call_jaxpr"].jaxpr, "debug_info", None), "func_src_info", None) or ""
    if walk.is_derivative or is_ours(where.rpartition(" at ")[2]) or len(before + after) < len(inputs + outputs):
        return outputs
    wanted, given = _differentiable(equation.traced[0], before)
    if wanted and given:
        factor = Symbol(walk.number("gradient", id(equation.traced[0])), "mixed", False)
        gradients = [Value(of(factor, True), after[n].place, walk.number(factor, n), free=False) for n in given]
        one, other = (_pullback(each, wanted, given) for each in equation.traced)
        walk.is_derivative = True
        try:
            found = walk.run(one, other, [*before, *gradients])
        finally:
            walk.is_derivative = False
        for n, gradient in zip(wanted, found):
            if lost := _mixed_gradient(gradient, before[n].place, of(factor, True), equation):
                return [lost] * len(outputs)
    return outputs


def _differentiable(traced: Any, inputs: list[Value]) -> tuple[list[int], list[int]]:
    """The inputs that something is differentiated by, and the outputs that are used."""
    wanted, given = (
        [n for n, variable in enumerate(some) if jnp.issubdtype(variable.aval.dtype, jnp.floating)]
        for some in (traced.invars, traced.outvars)
    )
    wanted = [n for n in wanted if not (inputs[n].free or isinstance(traced.invars[n], Literal))]
    return wanted, [n for n in given if type(traced.outvars[n]).__name__ != "DropVar"]


def _mixed_gradient(gradient: Known, place: Any, each: Any, equation: Equation) -> Lost | None:
    """None where it is each row's own times the gradient that comes in."""
    if isinstance(gradient, Lost):
        why = f"its derivative: {gradient.message or gradient.source.primitive}"
        return gradient._replace(source=equation.source, message=why)
    allowed = each | SHARED if place is None else each
    if gradient.terms <= allowed and (not gradient.terms or gradient.place == place):
        return None
    return Lost("mixed", equation.source, certain=True)


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


def _carry(
    walk: Interpreter, equation: Equation, body: Callable[[list[Known]], list[Known]], carry: list[Known]
) -> Any:
    """What is known of a loop's carry in any round."""

    def known(value: Known) -> Any:
        if isinstance(value, Lost):
            return value.how, value.certain
        return value.terms, value.place, value.fresh, value.free, value.state, value.doubts, value.unsure

    def widened(value: Known) -> Known:
        """In a loop each round would make symbols of its own."""
        symbols = [s for s in symbols_of(value) if s.kind in ("mixed", "sum")] if isinstance(value, Value) else []
        if symbols:
            source, unsure = symbols[0].source or equation.source, value.unsure  # type: ignore[union-attr]
            return Lost("unsure" if unsure else "mixed", source, "", symbols[0].origin, certain=not unsure)
        return value

    carry = [value.but(values=None, position=False) if isinstance(value, Value) else value for value in carry]
    for _ in range(_ROUNDS):
        after = [widened(joined(walk, *pair)) for pair in zip(carry, body(carry))]
        alike = [known(a) == known(b) for a, b in zip(carry, after)]
        carry = [a if same else b for a, b, same in zip(carry, after, alike)]
        if all(alike):
            return carry
    raise CannotTell(equation.name)


def _scanned(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    params = equation.params
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, entries = inputs[:first], inputs[first:second], [_entry(value) for value in inputs[second:]]
    over_rows = any(isinstance(value, Value) and value.place == LIFTED for value in entries)
    if not over_rows and params["length"] != equation.other_params["length"]:
        raise CannotTell(f"{params['length']} rounds for {walk.rows[0]} rows")

    def body(carry: list[Known]) -> list[Known]:
        return walk.run(params["jaxpr"], equation.other_params["jaxpr"], [*consts, *carry, *entries])

    if over_rows and carry:
        found = body(carry)
        if not all(isinstance(value, Value) and value.is_shared for value in (*carry, *found[: len(carry)])):
            raise CannotTell("scan over rows")
        carry = found[: len(carry)]
    else:
        carry = _carry(walk, equation, lambda carry: body(carry)[: len(carry)], carry)
        found = body(carry)
    return [*carry, *(_rounds(value) for value in found[len(carry) :])]


def _entry(value: Known) -> Known:
    """What one round of a scan gets of an array."""
    if isinstance(value, Lost):
        return value
    value, place = value.but(values=None, position=False, parts=None), value.place
    if place is None or place == LIFTED:
        return value
    if place.axis == 0 and place[1:] != (1, 1):
        raise CannotTell("scan over parts of the rows")
    return value.but(place=place._replace(axis=place.axis - 1))  # LIFTED where it is over rows


def _rounds(value: Known) -> Known:
    """What a scan makes of what its rounds give."""
    if isinstance(value, Lost):
        return value
    place = value.place and value.place._replace(axis=value.place.axis + 1)
    return value.but(place=place, scalar=False, values=None, position=False)


def _looped(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    params, other = equation.params, equation.other_params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, consts, carry = inputs[:first], inputs[first:second], inputs[second:]
    bodies = params["body_jaxpr"], other["body_jaxpr"]
    carry = _carry(walk, equation, lambda carry: walk.run(*bodies, [*consts, *carry]), carry)
    (goes_on,) = walk.run(params["cond_jaxpr"], other["cond_jaxpr"], [*condition, *carry])
    if isinstance(goes_on, Lost) or not goes_on.is_shared:
        raise CannotTell("while")
    return carry


def _branched(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    which, *rest = inputs
    pairs = list(zip(equation.params["branches"], equation.other_params["branches"], strict=True))
    if isinstance(which, Lost) or not (which.values or which.guard or which.is_shared):
        raise CannotTell("cond")
    if which.values is not None and which.values[0] == which.values[1]:
        return walk.run(*pairs[int(which.values[0])], rest)
    found = [walk.run(one, other, list(rest)) for one, other in pairs]
    if which.guard and not _guarded(which, [value for each in found for value in each]):
        raise MixesRows("unsure")
    result = found[0]
    for each in found[1:]:
        result = [joined(walk, *pair) for pair in zip(result, each, strict=True)]
    return [
        value.but(state=value.state | which.state, doubts=value.doubts | which.doubts)
        if isinstance(value, Value)
        else value
        for value in result
    ]


def _guarded(which: Value, found: list[Known]) -> bool:
    """Whether the branches are what is asked for, and numbers that are written down."""
    known = [value for value in found if isinstance(value, Value) and value.values is None]
    return bool(known) and (which.guard in (FINITE, NAN) or all(value.divides(which.guard) for value in known))


def _axes_of(spec: Any, axis: int) -> frozenset[str]:
    """The axes of devices that an array's axis is spread over."""
    part = spec[axis] if axis < len(spec) else None
    return frozenset(part if isinstance(part, tuple) else () if part is None else (part,))


def _on_devices(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    """`shard_map`: the same on each device, for the rows that it has."""
    params = equation.params
    values = [value for value in inputs if isinstance(value, Value)]
    splits = {
        _axes_of(spec, value.place.axis) if value.place != LIFTED else frozenset()
        for value, spec in zip(values, params["in_specs"])
        if value.place is not None
    }
    if len(splits) > 1 or walk.split or len(values) < len(inputs):
        raise CannotTell(equation.name)
    split = next(iter(splits), frozenset())
    count = math.prod(params["mesh"].shape[name] for name in split)
    if count == 1:
        return walk.run(params["jaxpr"], equation.other_params["jaxpr"], inputs)
    given = [_of_device(walk, value) if value.place is not None else value for value in values]
    rows, walk.split = walk.rows, split
    walk.rows = rows[0] // count, rows[1] // count
    try:
        found = walk.run(params["jaxpr"], equation.other_params["jaxpr"], given)
    finally:
        walk.rows, walk.split = rows, frozenset()
    return [_of_devices(value, spec, split, equation) for value, spec in zip(found, params["out_specs"])]


def _of_device(walk: Interpreter, value: Value) -> Value:
    """One device's rows of an array: a number of its own, whose sums are parts of the array's."""
    if value.place is None or value.place[1:] != (1, 1):
        raise CannotTell("shard_map")
    number = walk.number("local", value.number)
    walk.whole_of[number] = "local", walk.whole_of.get(value.number, value.number)
    return value.but(number=number, position=False)


def _of_devices(value: Known, spec: Any, split: frozenset[str], equation: Equation) -> Known:
    """What all devices give together: their rows behind each other, or what is the same on all of them."""
    if isinstance(value, Lost):
        return value
    apart = value.place not in (None, LIFTED) and _axes_of(spec, value.place.axis) != split
    mixes = any(symbol.kind == "mixed" for symbol in symbols_of(value))
    if apart or (value.local and not mixes):  # rows of one device, or sums over them
        return Lost("unsure", equation.source)
    return value.but(scalar=False, values=None) if value.place is None and spec else value


def _solves(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    """`custom_linear_solve`: what it solves with; its derivative is that of the solution."""
    lengths = equation.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    solve = [*inputs[start : start + lengths.solve], *inputs[sum(length or 0 for length in lengths) :]]
    return walk.run(equation.params["jaxprs"].solve, equation.other_params["jaxprs"].solve, solve)


NESTED_RULES: dict[str, Rule] = {
    **dict.fromkeys(("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"), _called),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _with_own_derivative),
    "scan": _scanned,
    "while": _looped,
    "cond": _branched,
    "shard_map": _on_devices,
    "custom_linear_solve": _solves,
}
