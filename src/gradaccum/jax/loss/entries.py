"""Operations that work entry by entry, and draws of random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from gradaccum.jax.loss.algebra import chosen, common_place, function, lifted, power_of, product, quotient, union
from gradaccum.jax.loss.values import FINITE, Known, Symbol, Term
from gradaccum.jax.loss.walk import CONSTANT, Equation, Rule, Value, Walk, line

__all__ = ["ENTRY_RULES"]

_TINY = 1e-6
"""What is added to a denominator, or is the least that it may be, as a guard."""
_ROUNDED = {True: 1e-6, False: 1e-8}
"""What may be added without a change beyond rounding in float32: to a sum of whole numbers, and to any other."""
_ROUNDED_IN_DOUBLE = 1e-12

Terms = Callable[[list[Known], Equation], Any]


def _rule(terms: Terms, values: Callable[..., Any] | None = None) -> Rule:
    """A rule that gives the terms of one output, and its value where those of the inputs are known."""

    def rule(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
        if values is not None and (numbers := _values(values, inputs)) is not None:
            return [walk.of_values(*numbers)]
        place = common_place(inputs)
        given = list(inputs)
        inputs = [lifted(value, place, equation.source) for value in inputs]
        found = walk.made(equation, inputs, terms(inputs, equation), place)
        cores = [value.core for value in given if value.values is None]
        # A multiple of a sum by a known number counts as that sum.
        return [found.but(core=cores[0]) if len(cores) == 1 and equation.name in ("mul", "div", "neg") else found]

    return rule


def _values(compute: Callable[..., Any], inputs: list[Known]) -> tuple[Any, Any] | None:
    pairs = [value.values for value in inputs]
    if any(pair is None for pair in pairs):
        return None
    try:
        first, second = (compute(*(pair[n] for pair in pairs if pair)) for n in (0, 1))
    except (ArithmeticError, TypeError, ValueError):
        return None
    return (first, second) if not isinstance(first, complex) else None


def _sum(inputs: list[Known], equation: Equation) -> Any:
    return union(inputs)


def _function(inputs: list[Known], equation: Equation) -> Any:
    return function(inputs, equation.source, equation.number)


def _product(inputs: list[Known], equation: Equation) -> Any:
    return product(inputs[0], inputs[1], equation.source)


def _quotient(inputs: list[Known], equation: Equation) -> Any:
    return quotient(inputs[0], inputs[1], equation.source, equation.number)


def _power(degree: Fraction | float) -> Terms:
    return lambda inputs, equation: power_of(inputs[0], Fraction(degree), equation.source, equation.number)


def _integer_power(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    return _rule(_power(equation.params["y"]), lambda x: x ** equation.params["y"])(walk, equation, inputs)


def _any_power(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    degree = inputs[1].values
    if degree is not None and degree[0] == degree[1] and abs(degree[0]) <= 8:
        return _rule(_power(Fraction(degree[0]).limit_denominator(64)))(walk, equation, inputs[:1])
    return _rule(_function, operator.pow)(walk, equation, inputs)


def _same(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """The numbers themselves, in another dtype maybe."""
    return [value.but() for value in inputs]


def _converted(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    (old, *_), (new, *_) = equation.dtypes
    whole = [str(dtype).startswith(("bool", "int", "uint")) for dtype in (old, new)]
    if whole == [False, True]:
        return _rule(_function, int)(walk, equation, inputs)
    return [inputs[0].but()]


def _compared(compute: Callable[[Any, Any], Any]) -> Rule:
    plain = _rule(_function, compute)

    def rule(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
        a, b = inputs
        if a.position and b.values == (0, 0) and equation.name == "lt":
            return [walk.of_values(False, False)]
        asks = None
        if a.number == b.number and a.place is None:
            asks = FINITE
        for x, y in ((a, b), (b, a)):
            if _small(x, 1.0 if y.whole else _TINY) is not None and y.core and y.place is None and y.free:
                asks = y.core[0]
        (found,) = plain(walk, equation, inputs)
        return [found.but(guard=asks) if asks and isinstance(found, Known) and not found.values else found]

    return rule


def _small(value: Known, most: float = 1.0) -> float | None:
    """A number from 0 to this, for any rows."""
    values = value.values
    return values[0] if values is not None and values[0] == values[1] and 0 <= values[0] <= most else None


def _largest(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """`max`: of a sum of the batch and a small number, that sum."""
    for a, b in (inputs, inputs[::-1]):
        counts = b.place is None and b.free and b.terms and not b.values
        least = _small(a)
        if least is not None and counts and any(term.own or term.factor for term in b.terms):
            if b.whole or least <= _TINY:
                return [b.but()]
            doubt = f"It divides by {least:g} where the sum at {line(equation.source.info)} is smaller, which "
            return [b.but(doubts=b.doubts | {f"{doubt}a micro-batch's may be: it is not one of whole numbers."})]
        if a.values in ((0, 0), (0.0, 0.0)) and b.place is not None and len({term.factor for term in b.terms}) == 1:
            return _rule(_power(1))(walk, equation, [b])
        if a.values is not None and a.values[0] == -np.inf:
            return [b.but()]
    return _rule(_function, max)(walk, equation, inputs)


def _added(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    for a, b in (inputs, inputs[::-1]):
        tiny = _small(a, _TINY)
        if tiny is not None and b.place is None and b.free and b.terms and not b.values:
            if tiny <= (_ROUNDED_IN_DOUBLE if equation.dtypes[1][0] == np.float64 else _ROUNDED[b.whole]):
                return [b.but()]
            doubt = f"It adds {tiny:g} to the sum at {line(equation.source.info)}, and micro-batches do so each "
            return [b.but(doubts=b.doubts | {f"{doubt}to its own: off by that, in relation to their sums."})]
    return _rule(_sum, operator.add)(walk, equation, inputs)


def _select(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    which, *cases = inputs
    if which.values is not None and which.values[0] == which.values[1]:
        return [cases[int(which.values[0])].but()]
    kept = [case for case in cases if case.values is None]
    settled = which.guard == FINITE or (which.guard and all(case.divides(which.guard) for case in kept))
    if settled and len(kept) == 1 and kept[0].place == common_place(inputs):
        return [kept[0].but()]
    place = common_place(inputs)
    which, *cases = (lifted(value, place, equation.source) for value in inputs)
    return [walk.made(equation, inputs, chosen(which, cases, equation.source, equation.number), place)]


def _finite(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    (found,) = _rule(_function)(walk, equation, inputs)
    assert isinstance(found, Known)
    return [found.but(guard=FINITE if inputs[0].place is None else None)]


def _iota(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    if place is None or place.axis != equation.params["dimension"]:
        return [walk.made(equation, [], CONSTANT, place)]
    symbol = Symbol("position", "position", True, True, equation.source)
    found = walk.made(equation, [], frozenset([Term(True, frozenset([(symbol, Fraction(1))]))]), place)
    return [found.but(position=place[1:] == (1, 1))]


def _drawn(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """Random numbers, and keys, from a key."""
    (key, *_) = inputs
    place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    own = any(term.own for value in inputs for term in value.terms)
    if place is None or own:
        place = place or common_place(inputs)
        terms = function(inputs, equation.source, equation.number)
    elif key.fresh:
        terms = frozenset([Term(True)])
    else:
        symbol = Symbol(equation.number, "random", key.free, True, equation.source)
        terms = frozenset([Term(True, frozenset([(symbol, Fraction(1))]))])
    # What is drawn from a state of random numbers is meant to be another one each time.
    return [walk.made(equation, inputs, terms, place).but(state=frozenset())]


def _folded(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """A key with a number in it: other ones for rows by their place are as drawn for them."""
    key, data = inputs
    if any(term.own for term in data.terms) and not any(term.own for term in key.terms):
        return _drawn(walk, equation, [key, data.but(terms=CONSTANT)])
    return [
        value.but(state=frozenset()) if isinstance(value, Known) else value
        for value in _rule(_function)(walk, equation, inputs)
    ]


ENTRY_RULES: dict[str, Rule] = {
    "add": _added,
    "add_any": _added,
    "sub": _rule(_sum, operator.sub),
    "mul": _rule(_product, operator.mul),
    "div": _rule(_quotient, operator.truediv),
    "neg": _rule(_sum, operator.neg),
    "abs": _rule(_power(1), abs),
    "square": _rule(_power(2), lambda x: x * x),
    "sqrt": _rule(_power(0.5), lambda x: x**0.5),
    "rsqrt": _rule(_power(-0.5), lambda x: x**-0.5),
    "integer_pow": _integer_power,
    "pow": _any_power,
    "max": _largest,
    "min": _rule(_function, min),
    "select_n": _select,
    "is_finite": _finite,
    "convert_element_type": _converted,
    "iota": _iota,
    "random_bits": _drawn,
    "random_split": _drawn,
    "random_fold_in": _folded,
    **{name: _compared(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{
        name: _same
        for name in (
            "copy", "copy_p", "real", "conj", "reduce_precision", "stop_gradient", "optimization_barrier", "pcast",
            "pvary", "pbroadcast", "sharding_constraint", "reshard",
            "random_wrap", "random_unwrap", "device_put", "name", "mesh_cast",
        )
    },
    **{
        name: _rule(_function)
        for name in (
            "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
            "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "cos", "cosh", "digamma", "erf",
            "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "igamma", "igammac", "imag", "le_to", "lgamma", "log",
            "log1p", "logistic", "lt_to", "nextafter", "not", "or", "population_count", "random_seed", "rem", "round",
            "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "tan", "tanh", "xor",
            "polygamma", "zeta", "regularized_incomplete_beta",
        )
    },
}  # fmt: skip
