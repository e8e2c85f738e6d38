"""What primitives that work entry by entry make of the rows, and those that draw random numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from gradaccum.jax.loss.domain import (
    FINITE,
    NAN,
    SHARED,
    Symbol,
    Term,
    Value,
    chosen,
    common_place,
    function,
    lifted,
    of,
    power_of,
    product,
    shift_of,
    symbols_of,
    union,
)  # fmt: skip
from gradaccum.jax.loss.interpreter import Equation, Interpreter, Known, Rule, is_whole, line

__all__ = ["ENTRY_RULES"]

_TINY = 1e-6
"""What is added to a denominator, or is the least that it may be, as a guard."""
_ROUNDED = {True: 1e-6, False: 1e-8}
"""What may be added without a change beyond rounding in float32: to a sum of whole numbers, and to any other."""
_ROUNDED_IN_DOUBLE = 1e-12

Terms = Callable[[list[Value], Equation], Any]


def _entries(terms: Terms, compute: Callable[..., Any] | None = None) -> Rule:
    """An operation entry by entry: the terms of its output, and its value where those of the inputs are known."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        if compute is not None and all(value.values is not None for value in inputs):
            try:
                return [walk.of_values(*(compute(*(v.values[n] for v in inputs if v.values)) for n in (0, 1)))]
            except (ArithmeticError, TypeError, ValueError):
                pass
        place = common_place(inputs)
        cores = [value.core for value in inputs if value.values is None]
        inputs = [lifted(value, place, equation.source) for value in inputs]
        found = walk.made(equation, inputs, terms(inputs, equation), place)
        # A multiple of a sum by a known number counts as that sum.
        return [found.but(core=cores[0]) if len(cores) == 1 and equation.name in ("mul", "div", "neg") else found]

    return rule


def _function(inputs: list[Value], equation: Equation) -> Any:
    return function(inputs, equation.source, equation.number)


def _power(degree: Fraction | float) -> Terms:
    return lambda inputs, equation: power_of(inputs[0], Fraction(degree), equation.source, equation.number)


def _product(inputs: list[Value], equation: Equation) -> Any:
    return product(inputs[0], inputs[1], equation.source)


def _quotient(inputs: list[Value], equation: Equation) -> Any:
    a, b = inputs
    return product(a, b.but(terms=power_of(b, Fraction(-1), equation.source, equation.number)), equation.source)


def _same(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """The numbers themselves."""
    return list(inputs)


def _converted(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    (old, *_), (new, *_) = equation.dtypes
    rounds = is_whole(new) and not is_whole(old)
    return _entries(_function, int)(walk, equation, inputs) if rounds else list(inputs)


def _any_power(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    degree = inputs[1].values
    if degree is not None and degree[0] == degree[1] and abs(degree[0]) <= 8:
        return _entries(_power(Fraction(degree[0]).limit_denominator(64)))(walk, equation, inputs[:1])
    return _entries(_function, operator.pow)(walk, equation, inputs)


def _small(value: Value, most: float = 1.0) -> float | None:
    """A number from 0 to this, for any rows."""
    values = value.values
    return values[0] if values is not None and values[0] == values[1] and 0 <= values[0] <= most else None


def _is_count(value: Value) -> bool:
    """Whether it follows from the whole batch, and not from the parameters: what a loss may be divided by."""
    return value.place is None and value.free and bool(value.terms) and not value.values


def _compared(compute: Callable[[Any, Any], Any]) -> Rule:
    plain = _entries(_function, compute)

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        a, b = inputs
        if a.position and b.values == (0, 0) and equation.name == "lt":
            return [walk.of_values(False, False)]
        asks: Any = None
        if a.number == b.number and a.place is None:
            asks = NAN if equation.name == "ne" else FINITE
        for x, y in ((a, b), (b, a)):
            if _small(x, 1.0 if y.whole else _TINY) is not None and y.core and y.place is None and y.free:
                asks = y.core[0]
        (found,) = plain(walk, equation, inputs)
        return [found.but(guard=asks) if asks and isinstance(found, Value) and not found.values else found]

    return rule


def _largest(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """`max`: of a sum of the batch and a small number, that sum."""
    for a, b in (inputs, inputs[::-1]):
        least = _small(a)
        if least is not None and _is_count(b) and any(term.own or term.factor for term in b.terms):
            if b.whole or least <= _TINY:
                return [b]
            doubt = f"It divides by {least:g} where the sum at {line(equation.source.info)} is smaller, which "
            return [b.but(doubts=b.doubts | {f"{doubt}a micro-batch's may be: it is not one of whole numbers."})]
        if a.values in ((0, 0), (0.0, 0.0)) and b.place is not None and len({term.factor for term in b.terms}) == 1:
            return _entries(_power(1))(walk, equation, [b])
        if a.values is not None and a.values[0] == -np.inf:
            return [b]
    return _bounded(max)(walk, equation, inputs)


def _bounded(compute: Callable[..., Any] | None) -> Rule:
    """What may leave a mean as it is: its bounds may be out of reach."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        means = [value for value in inputs if value.own and value.place is None]
        plain = means and all(symbol.kind == "count" for symbol in symbols_of(*means))
        (found,) = _entries(_function, compute)(walk, equation, inputs)
        return [found.but(unsure=found.unsure or bool(plain and not found.free))]  # type: ignore[union-attr]

    return rule


def _absolute(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    several = len({term.factor for term in inputs[0].terms}) > 1
    return (_bounded(abs) if several else _entries(_power(1), abs))(walk, equation, inputs)


def _added(compute: Callable[[Any, Any], Any]) -> Rule:
    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        for a, b in (inputs, inputs[::-1]) if compute is operator.add else ():
            tiny = _small(a, _TINY)
            if tiny is not None and _is_count(b):
                if tiny <= (_ROUNDED_IN_DOUBLE if equation.dtypes[1][0] == np.float64 else _ROUNDED[b.whole]):
                    return [b]
                doubt = f"It adds {tiny:g} to the sum at {line(equation.source.info)}, and micro-batches do so each "
                return [b.but(doubts=b.doubts | {f"{doubt}to its own: off by that, in relation to their sums."})]
        (found,) = _entries(lambda given, _: union(given), compute)(walk, equation, inputs)
        place = common_place(inputs)
        both = frozenset.intersection(*(lifted(value, place, equation.source).terms for value in inputs))
        cancels = any(not term.own and any(s.kind != "count" for s, _ in term.factor) for term in both)
        return [found.but(unsure=found.unsure or cancels) if isinstance(found, Value) else found]

    return rule


def _exponential(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """`exp(own + shared)` is a product, so that a shift that cancels out behind a logarithm is seen as one."""
    (value,) = inputs
    if value.place is None or (shift := shift_of(value)) is None:
        return _entries(_function)(walk, equation, inputs)
    symbol = next(symbol for term in shift for symbol, _ in term.factor)._replace(number=equation.number, kind="mixed")
    walk.logarithms[symbol] = shift
    return [walk.made(equation, inputs, of(symbol, value.own), value.place)]


def _logarithm(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    (value,) = inputs
    factors = {term.factor for term in value.terms}
    shifts = [walk.logarithms.get(symbol) for symbol, degree in next(iter(factors), ()) if degree == 1]
    if len(factors) == 1 and len(shifts) == 1 and shifts[0] and value.place is not None:
        return [walk.made(equation, inputs, shifts[0] | {Term(value.own)}, value.place)]
    return _entries(_function, math.log)(walk, equation, inputs)


def _select(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    which, *cases = inputs
    if which.values is not None and which.values[0] == which.values[1]:
        return [cases[int(which.values[0])]]
    place = common_place(inputs)
    kept = [case for case in cases if case.values is None]
    sure = kept and (which.guard in (FINITE, NAN) or (which.guard and all(case.divides(which.guard) for case in kept)))
    itself = len(kept) == 1 and which.guard == (FINITE, kept[0].number)
    if (sure or itself) and len(kept) == 1 and kept[0].place == place:
        return [kept[0]]
    which, *cases = (lifted(value, place, equation.source) for value in inputs)
    found = walk.made(equation, inputs, chosen(which, cases, equation.source, equation.number), place)
    if sure:  # what is asked of it is answered alike for all micro-batches that count
        found = found.but(unsure=any(case.unsure for case in cases))
    return [found]


def _finite(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    (found,) = _entries(_function)(walk, equation, inputs)
    assert isinstance(found, Value)
    return [found.but(guard=FINITE if inputs[0].place is None else (FINITE, inputs[0].number))]


def _both(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """`and`: whether it is NaN, and something else, is no where it is none."""
    (found,) = _entries(_function)(walk, equation, inputs)
    assert isinstance(found, Value)
    return [found.but(guard=NAN if any(value.guard == NAN for value in inputs) else None)]


def _iota(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    if place is None or place.axis != equation.params["dimension"]:
        return [walk.made(equation, [], SHARED, place)]
    symbol = Symbol("position", "position", source=equation.source, per_row=True)
    return [walk.made(equation, [], of(symbol, True), place).but(position=place[1:] == (1, 1))]


def _drawn(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """Random numbers, and keys, from a key: each row's own where its key is, or where micro-batches have their own."""
    key, *data = inputs
    place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    by_place = any(symbol.kind == "position" for symbol in symbols_of(*data))
    random = of(Symbol(equation.number, "random", key.free, False, equation.source, per_row=True), True)
    if by_place and not key.own:
        terms = frozenset([Term(True)]) if key.fresh else random
    elif place is None or any(value.own for value in inputs):
        place = place or common_place(inputs)
        terms = function([lifted(value, place, equation.source) for value in inputs], equation.source, equation.number)
    else:
        terms = frozenset([Term(True)]) if key.fresh else random
    # What is drawn from a state of random numbers is meant to be another one each time.
    return [walk.made(equation, inputs, terms, place).but(state=frozenset())]


_FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "cbrt", "ceil", "clz", "complex", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc",
    "exp2", "expm1", "floor", "igamma", "igamma_grad_a", "igammac", "imag", "le_to", "lgamma", "log1p", "logistic",
    "lt_to", "nextafter", "not", "or", "polygamma", "population_count", "random_gamma_grad", "random_seed",
    "regularized_incomplete_beta", "rem", "round", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "tan", "tanh", "xor", "zeta",
)  # fmt: skip
_SAME = (
    "copy", "copy_p", "real", "conj", "reduce_precision", "stop_gradient", "optimization_barrier", "pcast", "pvary",
    "pbroadcast", "sharding_constraint", "reshard", "random_wrap", "random_unwrap", "device_put", "name", "mesh_cast",
)  # fmt: skip

ENTRY_RULES: dict[str, Rule] = {
    **{name: _entries(_function) for name in _FUNCTIONS},
    **dict.fromkeys(_SAME, _same),
    **{name: _compared(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add": _added(operator.add),
    "add_any": _added(operator.add),
    "sub": _added(operator.sub),
    "mul": _entries(_product, operator.mul),
    "div": _entries(_quotient, operator.truediv),
    "neg": _entries(lambda inputs, _: union(inputs), operator.neg),
    "abs": _absolute,
    "square": _entries(_power(2), lambda x: x * x),
    "sqrt": _entries(_power(0.5), lambda x: x**0.5),
    "rsqrt": _entries(_power(-0.5), lambda x: x**-0.5),
    "integer_pow": lambda w, e, i: _entries(_power(e.params["y"]), lambda x: x ** e.params["y"])(w, e, i),
    "pow": _any_power,
    "max": _largest,
    "min": _bounded(min),
    "clamp": _bounded(None),
    "exp": _exponential,
    "log": _logarithm,
    "select_n": _select,
    "is_finite": _finite,
    "and": _both,
    "convert_element_type": _converted,
    "iota": _iota,
    **dict.fromkeys(("random_bits", "random_split", "random_fold_in"), _drawn),
}
