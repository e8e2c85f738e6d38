"""What each primitive makes of the rows: one table from its name to its rule, `RULES` at the end."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

import numpy as np

from gradaccum.jax.loss.algebra import (
    FINITE,
    LIFTED,
    NAN,
    SHARED,
    CannotTell,
    MixesRows,
    Place,
    Symbol,
    Term,
    Terms,
    Value,
    common_place,
    function,
    lifted,
    of,
    power_of,
    product,
    shift_of,
    summed,
    symbols_of,
    union,
)  # fmt: skip
from gradaccum.jax.loss.interpreter import NESTED_RULES, Equation, Interpreter, Rule, is_integral, line

__all__ = ["RULES"]

_TINY = 1e-6
"""What is added to a denominator, or is the least that it may be, as a guard."""
_ROUNDED, _ROUNDED_IN_DOUBLE = {True: 1e-6, False: 1e-8}, 1e-12
"""What may be added without a change beyond rounding: in float32 to a sum of whole numbers or to others, in float64."""
Axes = Callable[[Equation], Collection[int]]


# Entry by entry.


def _entries(terms: Callable[[list[Value], Equation], Terms], compute: Callable[..., Any] | None = None) -> Rule:
    """An operation entry by entry: the terms of its output, and its value where those of the inputs are known."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
        if compute is not None and all(value.values is not None for value in inputs):
            try:
                return walk.of_values(*(compute(*(v.values[n] for v in inputs if v.values)) for n in (0, 1)))
            except (ArithmeticError, TypeError, ValueError):
                pass
        cores = [value.core for value in inputs if value.values is None]
        place, values = walk.aligned(equation, inputs)
        found = walk.made(equation, values, terms(values, equation), place, moves=False)
        return found.but(core=cores[0]) if len(cores) == 1 and equation.name in ("mul", "div", "neg") else found

    return rule


def _any(inputs: list[Value], equation: Equation) -> Terms:
    return function(inputs, equation.source, equation.number)


def _power(degree: Fraction | float) -> Callable[[list[Value], Equation], Terms]:
    return lambda inputs, equation: power_of(inputs[0], Fraction(degree), equation.source, equation.number)


def _quotient(inputs: list[Value], equation: Equation) -> Terms:
    inverse = power_of(inputs[1], Fraction(-1), equation.source, equation.number)
    return product(inputs[0], inputs[1].but(terms=inverse), equation.source)


def _same(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Value]:
    return list(inputs)


def _converted(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    rounds = is_integral(equation.dtypes[1][0]) and not is_integral(equation.dtypes[0][0])
    return _entries(_any, int)(walk, equation, inputs) if rounds else inputs[0]


def _any_power(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    degree = inputs[1].values
    if degree is not None and degree[0] == degree[1] and abs(degree[0]) <= 8:
        return _entries(_power(Fraction(degree[0]).limit_denominator(64)))(walk, equation, inputs[:1])
    return _entries(_any, operator.pow)(walk, equation, inputs)


def _bounded(terms: Callable[[list[Value], Equation], Terms], compute: Callable[..., Any] | None) -> Rule:
    """What may leave a mean as it is: its bounds may be out of reach."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
        means = [value for value in inputs if value.own and value.place is None and not value.free]
        found: Value = _entries(terms, compute)(walk, equation, inputs)
        is_mean = bool(means) and all(symbol.kind == "count" for symbol in symbols_of(*means))
        return found.but(unsure=found.unsure or is_mean)

    return rule


def _small(value: Value, most: float = 1.0) -> float | None:
    """A number from 0 to this, for any rows."""
    values = value.values
    return values[0] if values is not None and values[0] == values[1] and 0 <= values[0] <= most else None


def _is_count(value: Value) -> bool:
    """Whether it follows from the whole batch, and not from the parameters: what a loss may be divided by."""
    return value.place is None and value.free and value.values is None and not value.terms <= SHARED


def _largest(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """`max`: of a sum of the batch and a small number, that sum."""
    for a, b in (inputs, inputs[::-1]):
        least = _small(a)
        if least is not None and _is_count(b):
            if b.integral or least <= _TINY:
                return b
            doubt = f"It divides by {least:g} where the sum at {line(equation.source.info)} is smaller, which "
            return b.but(doubts=b.doubts | {f"{doubt}a micro-batch's may be: it is not one of whole numbers."})
        if least == 0 and b.place is not None and len({term.factor for term in b.terms}) == 1:
            return _entries(_power(1))(walk, equation, [b])
        if a.values is not None and a.values[0] == -np.inf:
            return b
    return _bounded(_any, max)(walk, equation, inputs)


def _added(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    is_sum = equation.name != "sub"
    for a, b in (inputs, inputs[::-1]) if is_sum else ():
        tiny = _small(a, _TINY)
        if tiny is not None and _is_count(b):
            double = equation.dtypes[1][0] == np.float64
            if tiny <= (_ROUNDED_IN_DOUBLE if double else _ROUNDED[b.integral]):
                return b
            doubt = f"It adds {tiny:g} to the sum at {line(equation.source.info)}, and micro-batches do so each "
            return b.but(doubts=b.doubts | {f"{doubt}to its own: off by that, in relation to their sums."})
    found: Value = _entries(lambda given, _: union(given), operator.add if is_sum else operator.sub)(
        walk, equation, inputs
    )
    both = frozenset.intersection(*(value.terms for value in walk.aligned(equation, inputs)[1]))
    cancels = any(not term.own and any(s.kind != "count" for s, _ in term.factor) for term in both)
    return found.but(unsure=found.unsure or cancels)


def _exponential(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """`exp(own + shared)` is a product, so that a shift that cancels out behind a logarithm is seen as one."""
    (value,) = inputs
    if value.place is None or (shift := shift_of(value)) is None:
        return _entries(_any)(walk, equation, inputs)
    symbol = next(symbol for term in shift for symbol, _ in term.factor)
    symbol = symbol._replace(number=equation.number, kind="mixed", positive=True)
    walk.logarithms[symbol] = shift
    return walk.made(equation, inputs, of(symbol, value.own), value.place, moves=False)


def _logarithm(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    (value,) = inputs
    factors = {term.factor for term in value.terms}
    shifts = [walk.logarithms.get(symbol) for symbol, degree in next(iter(factors), ()) if degree == 1]
    if len(factors) == 1 and len(shifts) == 1 and shifts[0] and value.place is not None:
        return walk.made(equation, inputs, shifts[0] | {Term(value.own)}, value.place, moves=False)
    return _entries(_any, math.log)(walk, equation, inputs)


def _compared(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    (a, b), asks = inputs, None
    if a.position and b.values == (0, 0) and equation.name == "lt":
        return walk.of_values(False, False)
    if a.number == b.number and a.place is None:
        asks = NAN if equation.name == "ne" else FINITE
    for x, y in ((a, b), (b, a)):
        if _small(x, 1.0 if y.integral else _TINY) is not None and y.core is not None and y.place is None and y.free:
            asks = y.core
    found: Value = _entries(_any, getattr(operator, equation.name))(walk, equation, inputs)
    return found if asks is None or found.values else found.but(guard=asks)


def _select(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """`select_n`: one of several numbers, entry by entry."""
    which, *cases = inputs
    if which.values is not None and which.values[0] == which.values[1]:
        return cases[int(which.values[0])]
    kept, guard = [case for case in cases if case.values is None], which.guard
    sure = bool(kept and guard) and (guard in (FINITE, NAN) or all(case.divides(guard) for case in kept))
    if len(kept) == 1 and (sure or guard == (FINITE, kept[0].number)) and kept[0].place == common_place(inputs):
        return kept[0]
    place, values = walk.aligned(equation, inputs)
    which, *cases = values
    if sure:  # what is asked of it is answered in one way for all micro-batches that count
        terms = union([case for case in cases if case.values is None])
        found = walk.made(equation, values, terms, place, moves=False)
        return found.but(unsure=any(case.unsure for case in cases))
    terms = frozenset(Term(term.own or which.own, term.factor) for term in union(cases))
    if symbols_of(which) or (which.own and which.place is None):
        terms = _any(values, equation)
    return walk.made(equation, values, terms, place, moves=False)


def _finite(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    guard = FINITE if inputs[0].place is None else (FINITE, inputs[0].number)
    return _entries(_any)(walk, equation, inputs).but(guard=guard)


def _both(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """`and`: whether it is NaN, and something else, is no where it is none."""
    guard = NAN if any(value.guard == NAN for value in inputs) else None
    return _entries(_any)(walk, equation, inputs).but(guard=guard)


def _iota(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    if place is None or place.axis != equation.params["dimension"]:
        return walk.made(equation, [], SHARED, place)
    symbol = Symbol("position", "position", scalar=False, source=equation.source)
    return walk.made(equation, [], of(symbol, True), place).but(position=place[1:] == (1, 1))


def _drawn(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """Random numbers, and keys, from a key: each row's own where its key is, or where micro-batches have their own."""
    key, *data = inputs
    place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    by_place = any(symbol.kind == "position" for symbol in symbols_of(*data)) and not key.own
    if not by_place and (place is None or any(value.own for value in inputs)):
        place = place or common_place(inputs)
        values = [lifted(value, place, equation.source) for value in inputs]
        terms = function(values, equation.source, equation.number)
    else:
        random = Symbol(equation.number, "random", key.free, False, equation.source)
        terms = frozenset([Term(True)]) if key.fresh else of(random, True)
    # What is drawn from a state of random numbers is meant to be another one each time.
    return walk.made(equation, inputs, terms, place).but(state=frozenset())


# Across some axes.


def _across(axes: Axes, how: str = "function", mixes: str = "mixed") -> Rule:
    """An operation across these axes of its inputs, and on the others entry by entry: any function, or linear."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Value]:
        place, values = walk.aligned(equation, inputs)
        if place is not None and place != LIFTED and place.axis in axes(equation):
            raise MixesRows(mixes)
        terms = union(values) if how == "linear" else _any(values, equation)
        made = [
            walk.made(equation, inputs, terms, walk.placed(equation, place, n), n) for n in range(len(equation.outputs))
        ]
        return [made[0].but(whole=inputs[0].total)] if equation.name == "rev" else made

    return rule


def _last(count: int) -> Axes:
    return lambda equation: range(len(equation.shapes[0]) - count, len(equation.shapes[0]))


def _axis(equation: Equation) -> Collection[int]:
    return (equation.params["axis"] if "axis" in equation.params else equation.params["dimension"],)


def _windows(equation: Equation) -> Collection[int]:
    sizes = zip(equation.params["window_dimensions"], equation.params["window_strides"])
    return [axis for axis, pair in enumerate(sizes) if pair != (1, 1)]


def _solved(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Any:
    """`triangular_solve`: each column (or row) of the right side by itself, where the matrix is none of rows."""
    axis = len(equation.shapes[1]) - (2 if equation.params["left_side"] else 1)
    return _across(_last(2) if inputs[0].place is not None else lambda _: (axis,))(walk, equation, inputs)


def _moving(place_of: Callable[[Interpreter, Equation, Place], Place | None]) -> Rule:
    """An operation that moves entries, alike for all rows; `place_of` says where the rows go."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
        (value,) = inputs
        place = value.place if value.place in (None, LIFTED) else place_of(walk, equation, value.place)
        permutes = equation.name == "transpose" or (equation.name == "reshape" and equation.params["dimensions"])
        found = walk.made(equation, inputs, value.terms, place)
        if value.scalar or (equation.outputs[0] == equation.shapes[0] and not permutes):
            kept = {"terms": value.terms, "number": value.number, "scalar": value.scalar, "core": value.core}
            found = found.but(**kept, whole=value.whole)
        elif equation.name != "slice":
            found = found.but(whole=value.total)
        return found.but(values=value.values, position=value.position and place == Place(0))

    return rule


def _reshaped(walk: Interpreter, equation: Equation, place: Place) -> Place:
    old, new, order = equation.shapes[0], equation.outputs[0], equation.params.get("dimensions")
    if order is not None:  # it transposes first, as `vmap` has it of convolutions
        place, old = place._replace(axis=order.index(place.axis)), tuple(old[axis] for axis in order)
    before, after = math.prod(old[: place.axis]) * place.outer, place.inner * math.prod(old[place.axis + 1 :])
    for axis, length in enumerate(new):
        ahead, behind = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if ahead and behind and before % ahead == 0 and after % behind == 0:
            outer, inner = before // ahead, after // behind
            if outer * walk.rows[0] * inner == length:
                return Place(axis, outer, inner)
    raise MixesRows("unsure")  # groups of rows perhaps, which may be whole in each micro-batch


def _cut(walk: Interpreter, place: Place, first: int, last: int, length: int, stride: int = 1) -> Place:
    """The rows from `first` to `last` of their axis: all of them, or whole blocks of them where it has several."""
    block = walk.rows[0] * place.inner
    if (first, last, stride) == (0, length, 1):
        return place
    if stride != 1:
        raise MixesRows("unsure")
    if first % block or last % block:
        raise MixesRows("some")
    return place._replace(outer=(last - first) // block)


def _sliced(walk: Interpreter, equation: Equation, place: Place) -> Place:
    params, axis = equation.params, place.axis
    stride = 1 if params["strides"] is None else params["strides"][axis]
    bounds = params["start_indices"][axis], params["limit_indices"][axis]
    return _cut(walk, place, *bounds, equation.shapes[0][axis], stride)


def _split(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Value]:
    (value,), axis, place = inputs, equation.params["axis"], inputs[0].place
    ends = itertools.pairwise(np.cumsum([0, *equation.params["sizes"]]).tolist())
    over_rows = place is not None and place.axis == axis
    if not over_rows and equation.params["sizes"] != equation.other_params["sizes"]:
        raise CannotTell("split")
    places = [_cut(walk, place, *pair, equation.shapes[0][axis]) if over_rows and place else place for pair in ends]
    return [walk.made(equation, inputs, value.terms, place, n) for n, place in enumerate(places)]


def _broadcast(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    value = inputs[0]
    made, place = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0]), value.place
    if place is not None and place != LIFTED:
        place = place._replace(axis=equation.params["broadcast_dimensions"][place.axis])
    if place is not None and (made and made.axis) != (None if place == LIFTED else place.axis):
        raise MixesRows("pairs")
    if place is None and made is not None:
        value, place = lifted(value, made, equation.source), made
    found = walk.made(equation, inputs, value.terms, place)
    if value.scalar:
        found = found.but(terms=value.terms, number=value.number, scalar=True, values=value.values, core=value.core)
    is_entry = bool(equation.outputs[0]) and equation.outputs[0][-1] == 1
    return found.but(position=value.position, parts=(value,) if is_entry else None)


def _concatenated(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    axis, places = equation.params["dimension"], [value.place for value in inputs if value.place is not None]
    place = next(iter(places), None)
    if place is not None and place != LIFTED:
        along = place.axis == axis
        if len({each._replace(outer=1) if along else each for each in places}) > 1:
            raise MixesRows("mixed")
        if along and len(places) < len(inputs):
            raise CannotTell("concatenate")
        place = place._replace(outer=sum(each.outer for each in places)) if along else place
    values = [lifted(value, place, equation.source) for value in inputs]
    parts = tuple(value.parts[0] for value in inputs if value.parts is not None and len(value.parts) == 1)
    whole = len(parts) == len(inputs) and axis == len(equation.outputs[0]) - 1
    return walk.made(equation, inputs, union(values), place).but(parts=parts if whole else None)


# Sums, and other reductions.


def _as_sum(walk: Interpreter, equation: Equation, found: Value, over_rows: bool = True) -> Value:
    """A sum over the rows: one that others may be divided by, and a part of it where devices have parts of the rows."""
    sums = found.sums | {(found.number, equation.source)}
    return found.but(sums=sums, core=found.number, local=found.local or (over_rows and bool(walk.split)))


def _sum(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    (value,), place = inputs, inputs[0].place
    over_rows = place is not None and place != LIFTED and place.axis in equation.params["axes"]
    terms = summed(value.terms) if over_rows else value.terms
    found = walk.made(equation, inputs, terms, None if over_rows else walk.placed(equation, place))
    is_all = equation.outputs[0] == ()
    found = found.but(number=walk.number("sum", value.total)) if is_all else found.but(whole=value.total)
    return _as_sum(walk, equation, found, over_rows) if over_rows or value.sums else found


def _reduced(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Any:
    """The largest, the product, ...: of what is the same for all rows it may be of rows, too."""
    value, place, outputs = inputs[0], inputs[0].place, range(len(equation.outputs))
    orders = equation.name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
    if place is None or place == LIFTED or place.axis not in equation.params["axes"]:
        place = walk.placed(equation, place)
        terms = function([value], equation.source, equation.number)
        if orders and place is not None and len({term.factor for term in value.terms}) == 1:
            terms = power_of(value, Fraction(1), equation.source, equation.number)
        elif orders and shift_of(value) is not None:
            terms = value.terms
        return [walk.made(equation, inputs, terms, place, n) for n in outputs]
    if orders and not value.own:
        return walk.made(equation, inputs, value.terms, None)
    alone = equation.outputs[0] == ()
    number, source = equation.number, equation.source
    terms = of(Symbol(number, "mixed", value.free, alone, source, number, value.positive))
    asks = walk.number("sum", value.total) if value.free and equation.name == "reduce_or" and alone else None
    return [walk.made(equation, inputs, terms, None, n).but(guard=asks, local=bool(walk.split)) for n in outputs]


def _over_devices(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Any:
    """`psum`: of a `vmap`'s axis, a sum over it; of a mesh's, of the parts that its devices have."""
    axes = equation.params["axes"]
    if all(isinstance(axis, int) for axis in axes) and len(inputs) == 1:
        return _sum(walk, equation, inputs)
    if any(isinstance(axis, int) for axis in axes):
        raise CannotTell(equation.name)
    return [_of_all(walk, value, set(axes)) for value in inputs]


def _of_all(walk: Interpreter, value: Value, axes: set[str]) -> Value:
    """The sum over devices: of all parts of a sum over rows, that sum."""
    if walk.split & axes and value.place is not None and value.own:
        raise MixesRows("mixed")
    if value.local and axes == walk.split:
        return value.but(local=False)
    if value.values and not walk.split & axes:
        return value
    core, local = value.core and walk.number("psum", value.core), value.local and not walk.split <= axes
    return value.but(number=walk.number("psum", value.number), core=core, whole=None, values=None, local=local)


# Sums of products.


def _multiplied(place_of: Callable[[Interpreter, Equation, Place | None, Place | None], Place | None]) -> Rule:
    """Sums of products: `place_of` says where their rows are; nowhere, if they are summed over them."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
        left, right = (value.place for value in inputs)
        place = (
            _as_own(inputs) if LIFTED in (left, right) else (left or right) and place_of(walk, equation, left, right)
        )
        over_rows = place is None and (left or right) is not None
        a, b = (lifted(value, left or right, equation.source) for value in inputs)
        terms = product(a, b, equation.source)
        found = walk.made(equation, inputs, summed(terms) if over_rows else terms, place)
        return _as_sum(walk, equation, found) if over_rows else found

    return rule


def _as_own(values: list[Value]) -> Place | None:
    return common_place([value.but(terms=frozenset([Term(True)])) for value in values])


def _contracted(walk: Interpreter, equation: Equation, left: Place | None, right: Place | None) -> Place | None:
    contract, batch = equation.params["dimension_numbers"]
    taken = [(*contract[side], *batch[side]) for side in (0, 1)]
    if left is not None and right is not None:
        for pairs in (batch, contract):
            if left.axis in pairs[0] and right.axis == pairs[1][pairs[0].index(left.axis)]:
                if left[1:] != right[1:]:
                    raise MixesRows("mixed")
                return walk.placed(equation, left)
        raise MixesRows("mixed" if left.axis in taken[0] or right.axis in taken[1] else "pairs")
    if (left and left.axis in taken[0]) or (right and right.axis in taken[1]):
        raise CannotTell("dot_general")
    return walk.placed(equation, left or right)


def _convolved(walk: Interpreter, equation: Equation, image: Place | None, kernel: Place | None) -> Place | None:
    """Rows in the image, as rows of its batch or in an axis of space with a window of 1; a kernel, and perhaps a group
    of the image, for each row; or features of both, which are summed over."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    names = "feature_group_count", "batch_group_count"
    features, parts = (params[name] for name in names)  # one of them is 1
    grow = any(params[name] != equation.other_params[name] for name in names)
    keeps = False
    if image is not None and kernel is None:
        if image.axis == numbers.lhs_spec[0] and image.outer % parts == 0:
            return walk.placed(equation, image._replace(outer=image.outer // parts))
        if image.axis in numbers.lhs_spec[2:]:
            n = numbers.lhs_spec[2:].index(image.axis)
            window = equation.shapes[1][numbers.rhs_spec[2 + n]]
            keeps = window == params["window_strides"][n] == params["lhs_dilation"][n] == 1
            keeps = keeps and tuple(params["padding"][n]) == (0, 0)
    elif kernel is not None and kernel.axis == numbers.rhs_spec[1]:
        keeps = image == Place(numbers.lhs_spec[1], kernel.outer * features, kernel.inner)
    elif kernel is not None and kernel.axis == numbers.rhs_spec[0] and image is None:
        keeps = not grow and kernel.outer % (features * parts) == 0
    elif kernel is not None and image is not None and grow:
        length = equation.shapes[0][image.axis] // (features * parts)
        of_each = equation.shapes[1][kernel.axis] // (features * parts)
        in_groups = image.axis == numbers.lhs_spec[1 if parts == 1 else 0] and kernel.axis == numbers.rhs_spec[0]
        keeps = in_groups and image.outer == kernel.outer and image.inner * of_each == kernel.inner * length
    if not keeps:
        raise MixesRows("mixed")
    return walk.placed(equation, kernel or image)


# By indices.


def _gathered(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    (operand, indices), place = inputs, None
    if LIFTED in (operand.place, indices.place):
        place = _as_own(inputs)
    elif operand.place is not None or indices.place is not None:
        place = _place_gathered(walk, equation, operand.place, indices)
    kinds = {symbol.kind for symbol in symbols_of(indices)}
    values = [lifted(value, place, equation.source) for value in inputs]
    terms = frozenset(Term(term.own or indices.place is not None, term.factor) for term in values[0].terms)
    elsewhere = kinds - {"position"} or (kinds and _asks_elsewhere(equation, operand.place, indices))
    if elsewhere or (indices.place is None and indices.own):
        terms = function(values, equation.source, equation.number)
    return walk.made(equation, inputs, terms, place)


def _place_gathered(walk: Interpreter, equation: Equation, operand: Place | None, indices: Value) -> Place | None:
    """Where the result has its rows: those of the indices, or those that the operand has in an axis it keeps whole."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if operand is None:
        return walk.placed(equation, indices.place)
    axis, asked = operand.axis, indices.place
    if axis in numbers.operand_batching_dims:
        other = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        if asked != operand._replace(axis=other):
            raise MixesRows("mixed")
        return walk.placed(equation, asked)
    if sizes[axis] == equation.shapes[0][axis]:
        if asked is not None:
            raise MixesRows("pairs")
        return walk.placed(equation, operand)
    if axis in numbers.start_index_map and sizes[axis] == 1 and operand[1:] == (1, 1):
        n = numbers.start_index_map.index(axis)
        of_axis = indices.parts[n] if indices.parts is not None and n < len(indices.parts) else indices
        if of_axis.position:
            return walk.placed(equation, asked)
    raise MixesRows("order" if asked is not None else "some")


def _asks_elsewhere(equation: Equation, operand: Place | None, indices: Value) -> bool:
    """Whether a row's place in the batch asks for anything but this row: each micro-batch counts from 0."""
    asked = equation.params["dimension_numbers"].start_index_map
    if operand is None or operand.axis not in asked:
        return True
    parts = [indices] if indices.parts is None else [*indices.parts]
    if len(parts) != len(asked):
        return len(asked) > 1
    return bool(symbols_of(*(part for part, axis in zip(parts, asked) if axis != operand.axis)))


def _scattered(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """Sums into an array that has no rows (counts, histograms), and what is put at the same place of all rows."""
    (operand, indices, updates), numbers = inputs, equation.params["dimension_numbers"]
    rows = operand.place
    if rows not in (None, LIFTED) and rows.axis in numbers.operand_batching_dims:
        other = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(rows.axis)]
        batch_axes = [n for n in range(len(equation.shapes[2])) if n not in numbers.update_window_dims]
        moved = indices.place not in (None, rows._replace(axis=other))
        moved = moved or updates.place not in (None, rows._replace(axis=batch_axes[other]))
        if moved or equation.name == "scatter" or symbols_of(indices):
            raise CannotTell(equation.name)
        terms = union([lifted(value, rows, equation.source) for value in (operand, updates)])
        return walk.made(equation, inputs, frozenset(Term(t.own or indices.own, t.factor) for t in terms), rows)
    if indices.is_shared:
        return _put(walk, equation, operand, updates)
    placed = rows is None and indices.place is not None and updates.place is not None
    plain = not symbols_of(indices) and operand.terms <= SHARED
    if not (placed and plain and equation.name.endswith("add")):
        raise CannotTell(equation.name)
    own = frozenset(Term(True, term.factor) for term in updates.terms)
    found = walk.made(equation, inputs, operand.terms | own, None)
    return _as_sum(walk, equation, found)


def _put(walk: Interpreter, equation: Equation, operand: Value, updates: Value) -> Value:
    numbers = equation.params["dimension_numbers"]
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    of_updates = dict(
        zip(numbers.update_window_dims, [axis for axis in range(len(equation.shapes[0])) if axis not in taken])
    )
    found = updates.place
    if found is not None and found != LIFTED:
        if found.axis not in of_updates:
            raise MixesRows("mixed")
        found = found._replace(axis=of_updates[found.axis])
    place = common_place([operand, updates.but(place=found)])
    if place is not None and place != LIFTED:
        part = [axis for axis, where in of_updates.items() if where == place.axis]
        if not part or equation.shapes[2][part[0]] != equation.shapes[0][place.axis]:
            raise MixesRows("mixed")
    values = [lifted(value, place, equation.source) for value in (operand, updates.but(place=found))]
    terms = union(values)
    if equation.name == "scatter-mul":
        terms = values[0].terms | product(values[0], values[1], equation.source)
    return walk.made(equation, values, terms, place)


def _at(walk: Interpreter, equation: Equation, inputs: list[Value]) -> Value:
    """`dynamic_slice` and `dynamic_update_slice`."""
    count = 1 if equation.name == "dynamic_slice" else 2
    if any(not start.is_shared for start in inputs[count:]):
        raise CannotTell(equation.name)
    place, values = walk.aligned(equation, inputs[:count])
    part = equation.params["slice_sizes"] if count == 1 else equation.shapes[1]
    if place is not None and place != LIFTED and part[place.axis] != equation.shapes[0][place.axis]:
        raise MixesRows("some" if count == 1 else "mixed")
    return walk.made(equation, inputs, union(values), place)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_each(
        "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clz complex cos "
        "cosh digamma erf erf_inv erfc exp2 expm1 floor igamma igamma_grad_a igammac imag le_to lgamma log1p logistic "
        "lt_to nextafter not or polygamma population_count random_gamma_grad random_seed regularized_incomplete_beta "
        "rem round shift_left shift_right_arithmetic shift_right_logical sign sin sinh tan tanh xor zeta",
        _entries(_any),
    ),
    **_each(
        "copy copy_p real conj reduce_precision stop_gradient optimization_barrier pcast pvary pbroadcast reshard name "
        "sharding_constraint random_wrap random_unwrap device_put mesh_cast",
        _same,
    ),
    "log": _logarithm,
    "neg": _entries(lambda inputs, _: union(inputs), operator.neg),
    "mul": _entries(lambda inputs, equation: product(inputs[0], inputs[1], equation.source), operator.mul),
    "div": _entries(_quotient, operator.truediv),
    "square": _entries(_power(2), lambda x: x * x),
    "sqrt": _entries(_power(0.5), lambda x: x**0.5),
    "rsqrt": _entries(_power(-0.5), lambda x: x**-0.5),
    "integer_pow": lambda w, e, i: _entries(_power(e.params["y"]), lambda x: x ** e.params["y"])(w, e, i),
    "pow": _any_power,
    "abs": _bounded(_power(1), abs),
    "max": _largest,
    "min": _bounded(_any, min),
    "clamp": _bounded(_any, None),
    "exp": _exponential,
    "select_n": _select,
    "is_finite": _finite,
    "and": _both,
    "convert_element_type": _converted,
    "iota": _iota,
    **_each("add add_any sub", _added),
    **_each("eq ne lt le gt ge", _compared),
    **_each("random_bits random_split random_fold_in", _drawn),
    # Across some axes, and entry by entry on the others.
    "cumsum": _across(_axis, "linear"),
    **_each("cumprod cummax cummin cumlogsumexp", _across(_axis)),
    "sort": _across(_axis, mixes="order"),
    "rev": _across(lambda e: e.params["dimensions"], "linear", "order"),
    "pad": _across(lambda e: [n for n, each in enumerate(e.params["padding_config"]) if any(each)], "linear"),
    "reduce_window_sum": _across(_windows, "linear"),
    **_each("reduce_window_max reduce_window_min reduce_window", _across(_windows)),
    **_each("top_k approx_top_k lu_pivots_to_permutation", _across(_last(1))),
    **_each("cholesky eigh eig lu qr svd geqrf householder_product schur tridiagonal_solve", _across(_last(2))),
    "triangular_solve": _solved,
    "fft": lambda w, e, i: _across(_last(len(e.params["fft_lengths"])))(w, e, i),
    # Entries change their places.
    **_each("squeeze transpose", _moving(lambda w, e, p: w.placed(e, p))),
    **_each("reshape expand_dims", _moving(_reshaped)),
    "slice": _moving(_sliced),
    "split": _split,
    "tile": _moving(lambda w, e, p: p._replace(outer=p.outer * e.params["reps"][p.axis])),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "stack": lambda w, e, i: _across(lambda _: (), "linear")(w, e, i),
    # Over axes, which may be that of the rows.
    "reduce_sum": _sum,
    **_each("reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce_xor", _reduced),
    **_each("psum psum2 psum_invariant", _over_devices),
    "dot_general": _multiplied(_contracted),
    "conv_general_dilated": _multiplied(_convolved),
    # By indices.
    "gather": _gathered,
    **_each("scatter scatter-add scatter-mul", _scattered),
    **_each("dynamic_slice dynamic_update_slice", _at),
    **NESTED_RULES,
}
