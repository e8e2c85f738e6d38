"""Operations that hold jaxprs: calls, loops and branches."""

from __future__ import annotations

from typing import Any

from gradaccum.jax.loss.values import LIFTED, CannotTell, Known, MixesRows, Place
from gradaccum.jax.loss.walk import CALLS, Equation, Lost, Rule, Value, Walk, joined

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
    return (value.terms, value.place, value.fresh, value.free) if isinstance(value, Known) else value


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
    result = found[0]
    for each in found[1:]:
        result = [joined(walk, *pair) for pair in zip(result, each, strict=True)]
    return result


NESTED_RULES: dict[str, Rule] = {
    **dict.fromkeys(CALLS, _called), "scan": _scanned, "while": _looped, "cond": _branched,
}  # fmt: skip
