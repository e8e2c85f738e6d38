"""Primitives that hold jaxprs: calls, custom derivatives, loops, branches, devices, linear solvers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from gradaccum.jax.loss.walk import (
    COUNT,
    LIFTED,
    SHARED,
    CannotTell,
    Equation,
    MixesRows,
    Place,
    Rule,
    Source,
    Symbol,
    Tag,
    Terms,
    Value,
    followed,
    is_ours,
    joined,
    of,
    summed,
)

_ROUNDS = 6
"""Times that a loop's body is looked at until what is known of its carry stays."""


def _called(e: Equation, inputs: list[Value]) -> list[Value]:
    name = next((name for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in e.params), None)
    if name is None:
        raise CannotTell(e.name)
    e.walk.callers.append((e.params.get("name", ""), e.info))
    try:
        return e.walk.run(e.params[name], e.other_params[name], inputs)
    finally:
        e.walk.callers.pop()


def _with_own_derivative(e: Equation, inputs: list[Value]) -> list[Value]:
    """`custom_vjp` and `custom_jvp`: forward, and what they do with the gradients of their outputs.

    These are another factor in each micro-batch: a gradient must be multiplied by it once, row by row.
    """
    outputs, traced, walk = _called(e, inputs), e.traced[0], e.walk
    if walk.is_derivative or _is_of_jax(e) or any(value.is_lost for value in (*inputs, *outputs)):
        return outputs
    wanted = [n for n in _floats(traced.invars) if not (inputs[n].free or isinstance(traced.invars[n], Literal))]
    given = [n for n in _floats(traced.outvars) if type(traced.outvars[n]).__name__ != "DropVar"]
    if not (wanted and given):
        return outputs
    return _differentiated(e, inputs, outputs, wanted, given) or outputs


def _differentiated(
    e: Equation, inputs: list[Value], outputs: list[Value], wanted: list[int], given: list[int]
) -> list[Value] | None:
    """The outputs, if their gradients aren't passed on row by row; else None."""
    walk = e.walk
    number = walk.number("gradient", id(e.traced[0]))
    factor = of(Symbol(number, "mixed", Source(e.name, e.info, number), False), True)
    gradients = [Value(factor, outputs[n].place, walk.number(factor, n)) for n in given]
    walk.is_derivative = True
    try:
        first, second = (_pullback(each, wanted, given) for each in e.traced)
        found = walk.run(first, second, [*inputs, *gradients])
    finally:
        walk.is_derivative = False
    for place, gradient in zip((inputs[n].place for n in wanted), found):
        if (unknown := gradient.unknown) is not None:
            return [e.lost("unknown", [], why=f"its derivative: {unknown.why or unknown.primitive}") for _ in outputs]
        if not _is_multiple(gradient, factor, place):
            return [e.lost("mixed", inputs) for _ in outputs]
    return None


def _is_multiple(gradient: Value, factor: Terms, place: Place | None) -> bool:
    """Whether it is each row's own times this factor."""
    allowed = factor | SHARED if place is None else factor
    return gradient.terms <= allowed and (not gradient.terms or gradient.place == place)


def _is_of_jax(e: Equation) -> bool:
    where = getattr(getattr(e.params["call_jaxpr"].jaxpr, "debug_info", None), "func_src_info", None) or ""
    return is_ours(where.rpartition(" at ")[2])


def _floats(variables: Any) -> list[int]:
    return [n for n, variable in enumerate(variables) if jnp.issubdtype(variable.aval.dtype, jnp.floating)]


def _pullback(traced: Any, wanted: list[int], given: list[int]) -> Any:
    """From inputs and the gradients of these outputs to the gradients of these inputs."""
    variables = [v for v in dict.fromkeys(v for v in traced.invars if not isinstance(v, Literal))]
    debug_info = traced.params["call_jaxpr"].jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    alone = Jaxpr((), variables, [traced.outvars[n] for n in given], [traced], traced.effects, debug_info)
    run = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def function(values: list[Any], gradients: list[Any]) -> Any:
        def outputs(some: list[Any]) -> list[Any]:
            mine = dict(zip(traced.invars, values)) | {traced.invars[n]: value for n, value in zip(wanted, some)}
            return run(*(mine[v] for v in variables))

        return jax.vjp(outputs, [values[n] for n in wanted])[1](gradients)[0]

    kinds = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in some] for some in (traced.invars, traced.outvars)
    ]
    return jax.make_jaxpr(function)(kinds[0], [kinds[1][n] for n in given])


def _carry(e: Equation, body: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
    """What is known of a loop's carry in any round."""

    def facts(value: Value) -> Any:
        return value.terms, value.place, value.tags

    def widened(n: int, value: Value) -> Value:
        """In a loop each round would make symbols of its own."""
        symbols = [s for s in value.symbols if s != COUNT and s.kind in ("mixed", "sum", "count", "unknown")]
        if not symbols:
            return value
        kind = "unknown" if all(s.kind == "unknown" for s in symbols) else "mixed"
        return value.but(
            terms=of(Symbol(e.walk.number("carry", id(e.traced[0]), n), kind, symbols[0].source)), place=None
        )

    carry = [value.but(values=None, position=False) for value in carry]
    for _ in range(_ROUNDS):
        after = [widened(n, joined(e.walk, *pair)) for n, pair in enumerate(zip(carry, body(carry)))]
        stays = [facts(a) == facts(b) for a, b in zip(carry, after)]
        carry = [a if same else b for a, b, same in zip(carry, after, stays)]
        if all(stays):
            return carry
    raise CannotTell(e.name)


def _scanned(e: Equation, inputs: list[Value]) -> list[Value]:
    params = e.params
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, entries = inputs[:first], inputs[first:second], [_entry(value) for value in inputs[second:]]
    over_rows = any(value.place == LIFTED for value in entries)
    if not over_rows and params["length"] != e.other_params["length"]:
        raise CannotTell(f"{params['length']} rounds for {e.walk.rows[0]} rows")

    def body(carry: list[Value]) -> list[Value]:
        return e.walk.run(params["jaxpr"], e.other_params["jaxpr"], [*consts, *carry, *entries])

    if over_rows and carry:
        carry, found = _added_up(e, carry, body)
    else:
        carry = _carry(e, lambda carry: body(carry)[: len(carry)], carry)
        found = body(carry)[len(carry) :]
    moved = [v.place and v.place._replace(axis=v.place.axis + 1) for v in found]
    rounds = [v.but(place=p, scalar=False, values=None, position=False) for v, p in zip(found, moved)]
    return [*carry, *rounds]


def _added_up(
    e: Equation, carry: list[Value], body: Callable[[list[Value]], list[Value]]
) -> tuple[list[Value], list[Value]]:
    """What a scan over rows makes of its carry, if the body does no more than add to it: sums over the rows."""
    jaxpr = e.params["jaxpr"].jaxpr
    for variable, result in zip(jaxpr.invars[e.params["num_consts"] :], jaxpr.outvars[: len(carry)]):
        if not _only_adds(jaxpr, variable, result):
            raise CannotTell("scan over rows")
    found = body([Value(scalar=value.scalar) for value in carry])
    sums = []
    for n, (value, each) in enumerate(zip(carry, found)):
        if each.place is not None and each.terms:
            number = e.walk.number("scan", id(e.traced[0]), n)
            each = each.but(terms=summed(each.terms), place=None, number=number, core=number, whole=None)
            each = each.but(sums=each.sums | {Source(e.name, e.info, number)}).tagged(*[Tag.LOCAL] * bool(e.walk.split))
            value = each.but(terms=value.terms | each.terms, **followed([value, each]))
        elif each.terms:  # it adds the same in each round, so the rows
            raise CannotTell("scan over rows")
        sums.append(value.but(values=None))
    return sums, found[len(carry) :]


def _only_adds(jaxpr: Any, variable: Any, result: Any) -> bool:
    """Whether all that is done with this variable is that something is added to it, for this result."""
    uses = [each for each in jaxpr.eqns for one in each.invars if one is variable]
    is_result = [one is result for one in jaxpr.outvars if one is variable]
    if len(uses) != 1 or is_result:
        return not uses and is_result == [True]
    (use,) = uses
    if use.primitive.name == "convert_element_type" and jnp.issubdtype(use.params["new_dtype"], jnp.floating):
        return _only_adds(jaxpr, use.outvars[0], result)
    return use.primitive.name in ("add", "add_any") and use.outvars[0] is result and jaxpr.outvars.count(result) == 1


def _entry(value: Value) -> Value:
    """What one round of a scan gets of an array."""
    value, place = value.but(values=None, position=False, parts=None), value.place
    if value.axis == 0 and place != Place(0):
        raise CannotTell("scan over parts of the rows")
    # LIFTED where it is over rows
    return value if place is None or place == LIFTED else value.but(place=place._replace(axis=place.axis - 1))


def _looped(e: Equation, inputs: list[Value]) -> list[Value]:
    params, other = e.params, e.other_params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    bodies = params["body_jaxpr"], other["body_jaxpr"]
    carry = _carry(e, lambda carry: e.walk.run(*bodies, [*inputs[first:second], *carry]), inputs[second:])
    (goes_on,) = e.walk.run(params["cond_jaxpr"], other["cond_jaxpr"], [*inputs[:first], *carry])
    if not goes_on.is_shared:
        raise CannotTell("while")
    return carry


def _branched(e: Equation, inputs: list[Value]) -> list[Value]:
    which, *rest = inputs
    pairs = list(zip(e.params["branches"], e.other_params["branches"], strict=True))
    if not (which.values or which.guard or which.is_shared):
        raise CannotTell("cond")
    if which.values is not None and which.values[0] == which.values[1]:
        return e.walk.run(*pairs[int(which.values[0])], rest)
    found = [e.walk.run(one, other, rest) for one, other in pairs]
    if which.guard:  # the branches must be what it asks for, and numbers that are written down
        known = [value for each in found for value in each if value.values is None]
        if not known or not (
            which.guard in (Tag.FINITE, Tag.NAN) or all(value.divides(which.guard) for value in known)
        ):
            raise MixesRows(Tag.UNSURE)
    result = found[0]
    for each in found[1:]:
        result = [joined(e.walk, *pair) for pair in zip(result, each, strict=True)]
    return [value.tagged(*(which.tags - {Tag.UNSURE})) for value in result]


def _on_devices(e: Equation, inputs: list[Value]) -> list[Value]:
    """`shard_map`: the same on each device, for the rows that it has, whose sums are parts of the batch's."""
    params, walk = e.params, e.walk

    def axes_of(spec: Any, axis: int) -> frozenset[str]:
        part = spec[axis] if 0 <= axis < len(spec) else None
        return frozenset(part if isinstance(part, tuple) else () if part is None else (part,))

    splits = {axes_of(spec, value.place.axis) for value, spec in zip(inputs, params["in_specs"]) if value.place}
    if len(splits) > 1 or walk.split:
        raise CannotTell(e.name)
    split = next(iter(splits), frozenset())
    count = math.prod(params["mesh"].shape[name] for name in split)
    if count == 1:
        return walk.run(params["jaxpr"], e.other_params["jaxpr"], inputs)
    if any(value.place and value.place[1:] != (1, 1) for value in inputs):
        raise CannotTell(e.name)
    given = [value.but(position=False) if value.place else value for value in inputs]
    rows, walk.split = walk.rows, split
    walk.rows = rows[0] // count, rows[1] // count
    try:
        found = walk.run(params["jaxpr"], e.other_params["jaxpr"], given)
    finally:
        walk.rows, walk.split = rows, frozenset()

    def together(value: Value, spec: Any) -> Value:
        """What all devices give: their rows behind each other, or what is the same on all of them."""
        elsewhere = value.axis >= 0 and axes_of(spec, value.axis) != split
        if elsewhere or (Tag.LOCAL in value.tags and not any(symbol.kind == "mixed" for symbol in value.symbols)):
            return e.lost("mixed", [], Tag.UNSURE)
        return value.but(scalar=False, values=None) if value.place is None and spec else value

    return [together(*pair) for pair in zip(found, params["out_specs"])]


def _solves(e: Equation, inputs: list[Value]) -> list[Value]:
    """`custom_linear_solve`: what it solves with; its derivative is that of the solution."""
    lengths = e.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    solve = [*inputs[start : start + lengths.solve], *inputs[sum(length or 0 for length in lengths) :]]
    return e.walk.run(e.params["jaxprs"].solve, e.other_params["jaxprs"].solve, solve)


HOLD_JAXPRS: dict[str, Rule] = {
    **dict.fromkeys(("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"), _called),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _with_own_derivative),
    "scan": _scanned,
    "while": _looped,
    "cond": _branched,
    "shard_map": _on_devices,
    "custom_linear_solve": _solves,
}
