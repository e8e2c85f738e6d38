"""What each primitive makes of the rows: one table from its name to its rule, `RULES` at the end."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from gradaccum.jax.loss.nested import HOLD_JAXPRS
from gradaccum.jax.loss.walk import (
    LIFTED,
    SHARED,
    CannotTell,
    Equation,
    MixesRows,
    Place,
    Rule,
    Symbol,
    Tag,
    Term,
    Terms,
    Value,
    common_place,
    elsewhere,
    function,
    is_integral,
    lifted,
    line,
    of,
    power_of,
    product,
    summed,
    union,
)

_TINY = 1e-6
"""What is added to a denominator, or is the least that it may be, as a guard."""
_ROUNDED, _ROUNDED_IN_DOUBLE = {True: 1e-6, False: 1e-8}, 1e-12
"""What may be added without a change beyond rounding: in float32 to a sum of whole numbers or to others, in float64."""
_COMPUTED: dict[str, Callable[..., Any]] = {
    "abs": abs, "add": operator.add, "add_any": operator.add, "convert_element_type": int, "div": operator.truediv,
    "eq": operator.eq, "ge": operator.ge, "gt": operator.gt, "le": operator.le, "log": math.log, "lt": operator.lt,
    "max": max, "min": min, "mul": operator.mul, "ne": operator.ne, "neg": operator.neg, "pow": operator.pow,
    "rsqrt": lambda x: x**-0.5, "sqrt": lambda x: x**0.5, "square": lambda x: x * x, "sub": operator.sub,
}  # fmt: skip
"""What comes of numbers that are known."""


# Entry by entry.


def _any(e: Equation, values: list[Value], n: int = 0) -> Terms:
    """Any function, of several outputs the one at `n`."""
    number = e.walk.number("output", e.number, n) if n else e.number
    return function(values, e.source._replace(number=number))


def _entries(terms: Callable[[Equation, list[Value]], Terms] = _any) -> Rule:
    """An operation entry by entry, whose output has these terms."""

    def rule(e: Equation, inputs: list[Value]) -> Value:
        compute = _COMPUTED.get(e.name)
        if compute is not None and all(value.values is not None for value in inputs):
            try:
                return e.known(*(compute(*(v.values[n] for v in inputs if v.values)) for n in (0, 1)))
            except (ArithmeticError, TypeError, ValueError):
                pass
        cores = [value.core for value in inputs if value.values is None]
        place, values = e.aligned(inputs)
        found = e.made(values, terms(e, values), place, moves=False)
        return found.but(core=cores[0]) if len(cores) == 1 and e.name in ("mul", "div", "neg") else found

    return rule


def _power(degree: Fraction | float) -> Rule:
    return _entries(lambda e, values: power_of(values[0], Fraction(degree), e.source))


def _integer_power(e: Equation, inputs: list[Value]) -> Any:
    if inputs[0].values is not None:
        return e.known(*(value ** e.params["y"] for value in inputs[0].values))
    return _power(e.params["y"])(e, inputs)


def _any_power(e: Equation, inputs: list[Value]) -> Any:
    degree = inputs[1].values
    if degree is not None and degree[0] == degree[1] and abs(degree[0]) <= 8 and inputs[0].values is None:
        return _power(Fraction(degree[0]).limit_denominator(64))(e, inputs[:1])
    return _entries()(e, inputs)


def _quotient(e: Equation, values: list[Value]) -> Terms:
    return product(values[0], values[1].but(terms=power_of(values[1], Fraction(-1), e.source)), e.source)


def _converted(e: Equation, inputs: list[Value]) -> Any:
    rounds = is_integral(e.dtypes[1][0]) and not is_integral(e.dtypes[0][0])
    return _entries()(e, inputs) if rounds else inputs[0]


def _bounded(e: Equation, inputs: list[Value]) -> Value:
    """What may leave a mean as it is: its bounds may be out of reach."""
    means = [value for value in inputs if value.own and value.place is None and not value.free]
    found: Value = (_power(1) if e.name == "abs" else _entries())(e, inputs)
    is_mean = bool(means) and all(symbol.kind == "count" for mean in means for symbol in mean.symbols)
    return found.tagged(Tag.UNSURE) if is_mean else found


def _small(value: Value, most: float = 1.0) -> float | None:
    """A number from 0 to this, for any rows."""
    values = value.values
    return values[0] if values is not None and values[0] == values[1] and 0 <= values[0] <= most else None


def _is_count(value: Value) -> bool:
    """Whether it follows from the whole batch, and not from the parameters: what a loss may be divided by."""
    return value.place is None and value.free and value.values is None and not value.terms <= SHARED


def _largest(e: Equation, inputs: list[Value]) -> Value:
    """`max`: of a sum of the batch and a small number, that sum."""
    for a, b in (inputs, inputs[::-1]):
        least = _small(a)
        if least is not None and _is_count(b):
            doubt = f"It divides by {least:g} where the sum at {line(e.info)} is smaller, which "
            doubt += "a micro-batch's may be: it is not one of whole numbers."
            return b if b.integral or least <= _TINY else b.tagged(doubt)
        if least == 0 and b.place is not None and len({term.factor for term in b.terms}) == 1:
            return _power(1)(e, [b])
        if a.values is not None and a.values[0] == -np.inf:
            return b
    return _bounded(e, inputs)


def _added(e: Equation, inputs: list[Value]) -> Value:
    for a, b in (inputs, inputs[::-1]) if e.name != "sub" else ():
        tiny = _small(a, _TINY)
        if tiny is not None and _is_count(b):
            is_rounding = tiny <= (_ROUNDED_IN_DOUBLE if e.dtypes[1][0] == np.float64 else _ROUNDED[b.integral])
            doubt = f"It adds {tiny:g} to the sum at {line(e.info)}, and micro-batches do so each to its own: "
            return b if is_rounding else b.tagged(f"{doubt}off by that, in relation to their sums.")
    found: Value = _entries(lambda e, values: union(values))(e, inputs)
    both = frozenset.intersection(*(value.terms for value in e.aligned(inputs)[1]))
    cancels = any(not term.own and any(s.kind != "count" for s, _ in term.factor) for term in both)
    return found.tagged(Tag.UNSURE) if cancels else found


def _shift(value: Value) -> bool:
    """Whether all rows share parts of it that take all of them to know, and its others are plain."""
    shift = [term for term in value.terms if not term.own and term.factor]
    plain = all(symbol.scalar for term in shift for symbol, _ in term.factor)
    return bool(shift) and plain and all(term in shift or not term.factor for term in value.terms)


def _exponential(e: Equation, inputs: list[Value]) -> Value:
    """A shift that all rows share may cancel out behind a logarithm."""
    found: Value = _entries()(e, inputs)
    return found.tagged(Tag.UNSURE) if inputs[0].place is not None and _shift(inputs[0]) else found


def _compared(e: Equation, inputs: list[Value]) -> Value:
    (a, b), asks = inputs, None
    if a.position and b.values == (0, 0) and e.name == "lt":
        return e.known(False, False)
    if a.number == b.number and a.place is None:
        asks = Tag.NAN if e.name == "ne" else Tag.FINITE
    for x, y in ((a, b), (b, a)):
        if _small(x, 1.0 if y.integral else _TINY) is not None and y.core is not None and y.place is None and y.free:
            asks = y.core
    found: Value = _entries()(e, inputs)
    return found if asks is None or found.values else found.but(guard=asks)


def _select(e: Equation, inputs: list[Value]) -> Value:
    """`select_n`: one of several numbers, entry by entry."""
    which, *cases = inputs
    if which.values is not None and which.values[0] == which.values[1]:
        return cases[int(which.values[0])]
    kept = [case for case in cases if case.values is None]
    sure = _answers(which.guard, kept)
    is_itself = len(kept) == 1 and kept[0].place == common_place(inputs)
    if is_itself and (sure or which.guard == (Tag.FINITE, kept[0].number)):
        return kept[0]
    place, (which, *cases) = e.aligned(inputs)
    if sure:  # what is asked of it is answered in one way for all micro-batches that count
        known = union(filter(lambda case: case.values is None, cases))
        return e.made([which.but(tags=which.tags - {Tag.UNSURE}), *cases], known, place, moves=False)
    terms = frozenset(Term(term.own or which.own, term.factor) for term in union(cases))
    if which.symbols or (which.own and which.place is None):
        terms = _any(e, [which, *cases])
    return e.made([which, *cases], terms, place, moves=False)


def _answers(guard: Any, cases: list[Value]) -> bool:
    asked = bool(guard and cases)
    return asked and (guard in (Tag.FINITE, Tag.NAN) or all(case.divides(guard) for case in cases))


def _finite(e: Equation, inputs: list[Value]) -> Value:
    guard = Tag.FINITE if inputs[0].place is None else (Tag.FINITE, inputs[0].number)
    return _entries()(e, inputs).but(guard=guard)


def _both(e: Equation, inputs: list[Value]) -> Value:
    """`and`: whether it is NaN, and something else, is no where it is none."""
    return _entries()(e, inputs).but(guard=Tag.NAN if any(value.guard == Tag.NAN for value in inputs) else None)


def _iota(e: Equation, inputs: list[Value]) -> Value:
    place = e.grown()
    if place is None or place.axis != e.params["dimension"]:
        return e.made([], SHARED, place)
    symbol = Symbol("position", "position", e.source._replace(number=None), scalar=False)
    return e.made([], of(symbol, True), place).but(position=place[1:] == (1, 1))


def _drawn(e: Equation, inputs: list[Value]) -> Value:
    """Random numbers, and keys, from a key: each row's own where its key is, or where micro-batches have their own."""
    key, *data = inputs
    place = e.grown()
    by_place = any(symbol.kind == "position" for each in data for symbol in each.symbols) and not key.own
    if not by_place and (place is None or any(value.own for value in inputs)):
        place = place or common_place(inputs)
        terms = _any(e, [lifted(value, place, e.source) for value in inputs])
    else:
        random = Symbol(e.number, "random", e.source._replace(number=None), key.free, False)
        terms = frozenset([Term(True)]) if Tag.FRESH in key.tags else of(random, True)
    found = e.made(inputs, terms, place)  # drawn from a state of random numbers, it is meant to be another each time
    return found.but(tags=frozenset(tag for tag in found.tags if not tag.startswith("state")))


# Across some axes, and entry by entry on the others.


def _across(axes: Callable[[Equation], Collection[int]], linear: bool = False, tag: str = "") -> Rule:
    """An operation across these axes, and entry by entry on the others: any function, or linear."""

    def rule(e: Equation, inputs: list[Value]) -> list[Value]:
        place, values = e.aligned(inputs)
        if place is not None and place.axis in axes(e):
            raise MixesRows(tag)
        terms = [union(values) if linear else _any(e, values, n) for n, _ in enumerate(e.outputs)]
        return [e.made(inputs, each, e.placed(place, n), n) for n, each in enumerate(terms)]

    return rule


def _last(count: int) -> Callable[[Equation], Collection[int]]:
    return lambda e: range(len(e.shapes[0]) - count, len(e.shapes[0]))


def _named(e: Equation) -> Collection[int]:
    axes = next(e.params[name] for name in ("axis", "dimension", "dimensions") if name in e.params)
    return axes if isinstance(axes, tuple | list) else (axes,)


def _padded(e: Equation) -> Collection[int]:
    return [axis for axis, each in enumerate(e.params["padding_config"]) if any(each)]


def _windows(e: Equation) -> Collection[int]:
    sizes = zip(e.params["window_dimensions"], e.params["window_strides"])
    return [axis for axis, pair in enumerate(sizes) if pair != (1, 1)]


def _system(e: Equation) -> Collection[int]:
    """Of a right side each column (or row) by itself."""
    return (len(e.shapes[1]) - (2 if e.params["left_side"] else 1),)


def _solved(e: Equation, inputs: list[Value]) -> Any:
    return _across(_system if inputs[0].place is None else _last(2))(e, inputs)


# Entries change their places.


def _moved(e: Equation, inputs: list[Value]) -> Value:
    (value,) = inputs
    place = value.place
    if place is not None and place != LIFTED:
        place = _MOVED.get(e.name, Equation.placed)(e, place)
    permutes = e.name == "transpose" or e.params.get("dimensions")
    stays = value.scalar or (e.outputs[0] == e.shapes[0] and not permutes)
    found = value.but(parts=None, place=place) if stays else e.made(inputs, value.terms, place)
    return found.but(position=value.position and place == Place(0))


def _reshaped(e: Equation, place: Place) -> Place:
    old, new, order = e.shapes[0], e.outputs[0], e.params.get("dimensions")
    if order is not None:  # it transposes first, as `vmap` has it of convolutions
        place, old = place._replace(axis=order.index(place.axis)), tuple(old[axis] for axis in order)
    before, after = math.prod(old[: place.axis]) * place.outer, place.inner * math.prod(old[place.axis + 1 :])
    for axis, length in enumerate(new):
        ahead, behind = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if ahead and behind and before % ahead == 0 and after % behind == 0:
            outer, inner = before // ahead, after // behind
            if outer * e.walk.rows[0] * inner == length:
                return Place(axis, outer, inner)
    raise MixesRows(Tag.UNSURE)  # groups of rows perhaps, which may be whole in each micro-batch


def _cut(e: Equation, place: Place, first: int, last: int, stride: int = 1) -> Place:
    """The rows from `first` to `last` of their axis: all of them, or whole blocks of them where it has several."""
    block = e.walk.rows[0] * place.inner
    if (first, last, stride) == (0, e.shapes[0][place.axis], 1):
        return place
    if stride != 1:
        raise MixesRows(Tag.UNSURE)
    if first % block or last % block:
        raise MixesRows(Tag.SOME)
    return place._replace(outer=(last - first) // block)


def _sliced(e: Equation, place: Place) -> Place:
    first, last = (e.params[name][place.axis] for name in ("start_indices", "limit_indices"))
    return _cut(e, place, first, last, (e.params["strides"] or (1,) * len(e.shapes[0]))[place.axis])


_MOVED: dict[str, Callable[[Equation, Place], Place | None]] = {
    "expand_dims": _reshaped,
    "reshape": _reshaped,
    "slice": _sliced,
    "tile": lambda e, place: place._replace(outer=place.outer * e.params["reps"][place.axis]),
}


def _split(e: Equation, inputs: list[Value]) -> list[Value]:
    (value,), place, sizes = inputs, inputs[0].place, e.params["sizes"]
    ends = list(itertools.pairwise(np.cumsum([0, *sizes]).tolist()))
    if place is None or place.axis != e.params["axis"]:
        if sizes != e.other_params["sizes"]:
            raise CannotTell("split")
        return [e.made(inputs, value.terms, place, n) for n in range(len(ends))]
    return [e.made(inputs, value.terms, _cut(e, place, *pair), n) for n, pair in enumerate(ends)]


def _broadcast(e: Equation, inputs: list[Value]) -> Value:
    value, made, place = inputs[0], e.grown(), inputs[0].place
    if value.axis >= 0:
        place = Place(e.params["broadcast_dimensions"][value.axis], *value.place[1:])  # type: ignore[index]
    if place is not None and (made.axis if made else -1) != place.axis:
        raise MixesRows(Tag.PAIRS)
    if place is None and made is not None:
        value, place = lifted(value, made, e.source), made
    found = value.but(place=place) if value.scalar else e.made(inputs, value.terms, place)
    return found.but(position=value.position, parts=(value,) if e.outputs[0][-1:] == (1,) else None)


def _concatenated(e: Equation, inputs: list[Value]) -> Value:
    axis, places = e.params["dimension"], [value.place for value in inputs if value.place is not None]
    place = next(iter(places), None)
    if place is not None and place != LIFTED:
        along = place.axis == axis
        if len({each._replace(outer=1) if along else each for each in places}) > 1:
            raise MixesRows
        if along and len(places) < len(inputs):
            raise CannotTell("concatenate")
        place = place._replace(outer=sum(each.outer for each in places)) if along else place
    values = [lifted(value, place, e.source) for value in inputs]
    parts = tuple(value.parts[0] for value in inputs if value.parts is not None and len(value.parts) == 1)
    whole = len(parts) == len(inputs) and axis == len(e.outputs[0]) - 1
    return e.made(inputs, union(values), place).but(parts=parts if whole else None)


# Sums, and other reductions.


def _as_sum(e: Equation, found: Value, over_rows: bool = True) -> Value:
    """A sum over the rows: one that others may be divided by, and a part of it where devices have parts of the rows."""
    found = found.but(sums=found.sums | {e.source._replace(number=found.number)}, core=found.number)
    return found.tagged(Tag.LOCAL) if over_rows and e.walk.split else found


def _sum(e: Equation, inputs: list[Value]) -> Value:
    (value,), place = inputs, inputs[0].place
    over_rows = value.axis in e.params["axes"]
    found = e.made(inputs, summed(value.terms) if over_rows else value.terms, None if over_rows else e.placed(place))
    if e.outputs[0] == ():
        found = found.but(number=e.walk.number("sum", value.total), whole=None)
    return _as_sum(e, found, over_rows) if over_rows or value.sums else found


def _reduced(e: Equation, inputs: list[Value]) -> Any:
    """The largest, the product, ...: of what is the same for all rows it may be of rows, too."""
    value, place, alone = inputs[0], inputs[0].place, e.outputs[0] == ()
    orders = e.name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
    if value.axis not in e.params["axes"]:
        place, terms = e.placed(place), _any(e, [value])
        if orders and place is not None and len({term.factor for term in value.terms}) == 1:
            terms = power_of(value, Fraction(1), e.source)
        elif orders and _shift(value):
            terms = value.terms
        return e.made(inputs, terms, place)
    if orders and not value.own:
        return e.made(inputs, value.terms, None)
    terms = of(Symbol(e.number, "mixed", e.source, value.free, alone, value.positive))
    asks = e.walk.number("sum", value.total) if value.free and e.name == "reduce_or" and alone else None
    found = e.made(inputs, terms, None).but(guard=asks)
    return found.tagged(Tag.LOCAL) if e.walk.split else found


def _over_devices(e: Equation, inputs: list[Value]) -> Any:
    """`psum`: of a `vmap`'s axis, a sum over it; of a mesh's, of the parts that its devices have."""
    axes, split = e.params["axes"], e.walk.split
    if all(isinstance(axis, int) for axis in axes) and len(inputs) == 1:
        return _sum(e, inputs)
    if any(isinstance(axis, int) for axis in axes):
        raise CannotTell(e.name)

    def of_all(value: Value) -> Value:
        """The sum over devices: of all parts of a sum over rows, that sum."""
        local = Tag.LOCAL in value.tags
        if split & {*axes} and value.place is not None and value.own:
            raise MixesRows
        if local and {*axes} == split:
            return value.but(tags=value.tags - {Tag.LOCAL})
        if value.values and not split & {*axes}:
            return value
        number, core = e.walk.number("psum", value.number), value.core and e.walk.number("psum", value.core)
        tags = value.tags - {Tag.LOCAL} if split <= {*axes} else value.tags
        return value.but(number=number, core=core, whole=None, values=None, tags=tags)

    return [of_all(value) for value in inputs]


# Sums of products.


def _multiplied(e: Equation, inputs: list[Value]) -> Value:
    """A sum of products; where it does not grow with the rows, it is summed over them."""
    left, right = (value.place for value in inputs)
    if LIFTED in (left, right):
        place = _as_own(inputs)
    else:
        place = (left or right) and (_contracted if e.name == "dot_general" else _convolved)(e, left, right)
    over_rows = place is None and (left or right) is not None
    a, b = (lifted(value, left or right, e.source) for value in inputs)
    # Entries of one meet other entries of the other: what differs between them does not cancel.
    terms = product(a, b.but(terms=elsewhere(b.terms, e.number)), e.source)
    found = e.made(inputs, summed(terms) if over_rows else terms, place)
    return _as_sum(e, found) if over_rows else found


def _as_own(values: list[Value]) -> Place | None:
    return common_place([value.but(terms=frozenset([Term(True)])) for value in values])


def _contracted(e: Equation, left: Place | None, right: Place | None) -> Place | None:
    if left is not None and right is not None and left[1:] != right[1:]:
        raise MixesRows
    return e.placed(left or right)  # pairs of rows grow twice, what is summed over them doesn't


def _convolved(e: Equation, image: Place | None, kernel: Place | None) -> Place | None:
    """Rows in the image, as rows of its batch or in an axis of space with a window of 1; a kernel, and perhaps a group
    of the image, for each row; or features of both, which are summed over."""
    numbers, counts = e.params["dimension_numbers"], ("feature_group_count", "batch_group_count")
    features, parts = (e.params[name] for name in counts)  # one of them is 1
    grow = any(e.params[name] != e.other_params[name] for name in counts)
    if kernel is None:
        keeps = image is not None and _keeps_images(e, image, parts)
        image = image and image._replace(outer=image.outer // parts)
    elif kernel.axis == numbers.rhs_spec[1]:
        keeps = image == Place(numbers.lhs_spec[1], kernel.outer * features, kernel.inner)
    elif image is None:
        keeps = kernel.axis == numbers.rhs_spec[0] and not grow and kernel.outer % (features * parts) == 0
    else:  # a group for each row
        in_groups = numbers.lhs_spec[1 if parts == 1 else 0], numbers.rhs_spec[0]
        length, of_each = (e.shapes[n][place.axis] // (features * parts) for n, place in enumerate((image, kernel)))
        keeps = grow and (image.axis, kernel.axis) == in_groups
        keeps = keeps and image.outer == kernel.outer and image.inner * of_each == kernel.inner * length
    if not keeps:
        raise MixesRows
    return e.placed(kernel or image)


def _keeps_images(e: Equation, image: Place, parts: int) -> bool:
    params, spec = e.params, e.params["dimension_numbers"]
    if image.axis == spec.lhs_spec[0]:
        return image.outer % parts == 0
    if image.axis not in spec.lhs_spec[2:]:
        return False
    n = spec.lhs_spec[2:].index(image.axis)
    window = e.shapes[1][spec.rhs_spec[2 + n]], params["window_strides"][n], params["lhs_dilation"][n]
    return window == (1, 1, 1) and tuple(params["padding"][n]) == (0, 0)


# By indices.


def _gathered(e: Equation, inputs: list[Value]) -> Value:
    """Rows of the indices, or of the operand in an axis that stays whole; or each row asks for itself, by its place."""
    (operand, indices), axes = inputs, e.params["dimension_numbers"].start_index_map
    parts = indices.parts if indices.parts is not None and len(indices.parts) == len(axes) else (indices,)
    columns = dict(zip(axes, parts)) if len(parts) == len(axes) else {None: indices}
    of_rows = columns.pop(operand.axis, None)
    if LIFTED in (operand.place, indices.place):
        place = _as_own(inputs)
    else:
        by_place = of_rows is not None and of_rows.position
        place = e.placed(_place_gathered(e, operand.place, indices.place, by_place))
    values = [lifted(value, place, e.source) for value in inputs]
    terms = frozenset(Term(term.own or indices.place is not None, term.factor) for term in values[0].terms)
    foreign = any(each.symbols for each in columns.values()) or any(s.kind != "position" for s in indices.symbols)
    if foreign or (indices.place is None and indices.own):  # a place in the batch is another in each micro-batch
        terms = _any(e, values)
    return e.made(inputs, terms, place)


def _place_gathered(e: Equation, rows: Place | None, asked: Place | None, by_place: bool) -> Place | None:
    numbers = e.params["dimension_numbers"]
    if rows is None or (by_place and rows[1:] == (1, 1)):
        return asked
    if rows.axis in numbers.operand_batching_dims:
        other = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(rows.axis)]
        if asked != rows._replace(axis=other):
            raise MixesRows
        return asked
    if e.params["slice_sizes"][rows.axis] != e.shapes[0][rows.axis]:
        raise MixesRows(Tag.ORDER if asked is not None else Tag.SOME)
    if asked is not None:
        raise MixesRows(Tag.PAIRS)
    return rows


def _scattered(e: Equation, inputs: list[Value]) -> Value:
    """Sums into an array that has no rows (counts, histograms), and what is put at the same place of all rows."""
    (operand, indices, updates), numbers = inputs, e.params["dimension_numbers"]
    rows, windows = operand.place, numbers.update_window_dims
    if rows not in (None, LIFTED) and rows.axis in numbers.operand_batching_dims:
        other = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(rows.axis)]
        batch_axes = [n for n in range(len(e.shapes[2])) if n not in windows]
        moved = indices.place not in (None, rows._replace(axis=other))
        moved = moved or updates.place not in (None, rows._replace(axis=batch_axes[other]))
        if moved or e.name == "scatter" or indices.symbols:
            raise CannotTell(e.name)
        terms = union(lifted(value, rows, e.source) for value in (operand, updates))
        return e.made(inputs, frozenset(Term(t.own or indices.own, t.factor) for t in terms), rows)
    if indices.is_shared:
        return _put(e, operand, updates)
    placed = rows is None and indices.place is not None and updates.place is not None
    if not (placed and e.name.endswith("add") and not indices.symbols and operand.terms <= SHARED):
        raise CannotTell(e.name)
    own = frozenset(Term(True, term.factor) for term in updates.terms)
    return _as_sum(e, e.made(inputs, operand.terms | own, None))


def _put(e: Equation, operand: Value, updates: Value) -> Value:
    numbers = e.params["dimension_numbers"]
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(e.shapes[0])) if axis not in taken]
    of_updates = dict(zip(numbers.update_window_dims, kept))
    found = updates.place
    if found is not None and found != LIFTED:
        if found.axis not in of_updates:
            raise MixesRows
        found = found._replace(axis=of_updates[found.axis])
    place = common_place([operand, updates.but(place=found)])
    if place is not None and place != LIFTED:
        part = [axis for axis, where in of_updates.items() if where == place.axis]
        if not part or e.shapes[2][part[0]] != e.shapes[0][place.axis]:
            raise MixesRows
    values = [lifted(value, place, e.source) for value in (operand, updates.but(place=found))]
    terms = union(values)
    if e.name == "scatter-mul":
        terms = values[0].terms | product(values[0], values[1], e.source)
    return e.made(values, terms, place)


def _at(e: Equation, inputs: list[Value]) -> Value:
    """`dynamic_slice` and `dynamic_update_slice`."""
    count = 1 if e.name == "dynamic_slice" else 2
    if any(not start.is_shared for start in inputs[count:]):
        raise CannotTell(e.name)
    place, values = e.aligned(inputs[:count])
    part = e.params["slice_sizes"] if count == 1 else e.shapes[1]
    if place is not None and place != LIFTED and part[place.axis] != e.shapes[0][place.axis]:
        raise MixesRows(Tag.SOME if count == 1 else "")
    return e.made(inputs, union(values), place)


def _mapped(e: Equation, inputs: list[Value]) -> list[Value]:
    """Any other primitive: a function of what has no axis of rows, or entry by entry on that axis, where `vmap` over it
    of the operation on one row is the very same operation."""
    place, values = e.aligned(inputs)
    if (e.walk.split and not inputs) or (place is not None and place.axis >= 0 and not _is_own_vmap(e, place.axis)):
        raise CannotTell(e.name)
    return [e.made(inputs, _any(e, values, n), e.placed(place, n), n) for n in range(len(e.outputs))]


def _is_own_vmap(e: Equation, axis: int) -> bool:
    traced, axes, kinds = e.traced[0], [], []
    for variable, other in zip(traced.invars, e.traced[1].invars):
        shape, mapped = [*variable.aval.shape], variable.aval.shape != other.aval.shape
        if shape[axis : axis + 1] == [1]:  # it is the same for all rows
            shape[axis], mapped = e.walk.rows[0], True
        axes.append(axis if mapped else None)
        kinds.append(jax.ShapeDtypeStruct(tuple(shape), variable.aval.dtype))
    outs = [place and place.axis for place in (e.grown(n) for n in range(len(e.outputs)))]
    bind = lambda *one: traced.primitive.bind(*one, **traced.params)  # noqa: E731
    try:
        jaxpr = jax.make_jaxpr(jax.vmap(bind, axes, outs if traced.primitive.multiple_results else outs[0]))(*kinds)
    except Exception:  # it is another operation on one row
        return False
    names = [(each.primitive, repr(each.params), each.invars) for each in jaxpr.eqns]
    return names == [(traced.primitive, repr(traced.params), jaxpr.jaxpr.invars)]


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_each(
        "copy copy_p real conj reduce_precision stop_gradient optimization_barrier pcast pvary pbroadcast reshard name "
        "sharding_constraint random_wrap random_unwrap device_put mesh_cast",
        lambda e, inputs: list(inputs),
    ),
    # Entry by entry.
    **_each("add add_any sub", _added),
    "neg": _entries(lambda e, values: union(values)),
    "mul": _entries(lambda e, values: product(values[0], values[1], e.source)),
    "div": _entries(_quotient),
    "square": _power(2),
    "sqrt": _power(0.5),
    "rsqrt": _power(-0.5),
    "integer_pow": _integer_power,
    "pow": _any_power,
    "exp": _exponential,
    "max": _largest,
    **_each("abs min clamp", _bounded),
    **_each("eq ne lt le gt ge", _compared),
    "select_n": _select,
    "is_finite": _finite,
    "and": _both,
    "convert_element_type": _converted,
    "iota": _iota,
    **_each("random_bits random_split random_fold_in", _drawn),
    # Across some axes, and entry by entry on the others.
    "cumsum": _across(_named, linear=True),
    **_each("cumprod cummax cummin cumlogsumexp", _across(_named)),
    "sort": _across(_named, tag=Tag.ORDER),
    "rev": _across(_named, linear=True, tag=Tag.ORDER),
    "stack": _across(lambda e: (), linear=True),
    "pad": _across(_padded, linear=True),
    "reduce_window_sum": _across(_windows, linear=True),
    **_each("reduce_window_max reduce_window_min reduce_window", _across(_windows)),
    **_each("top_k approx_top_k", _across(_last(1))),
    **_each("cholesky eigh eig lu qr svd", _across(_last(2))),
    "fft": lambda e, inputs: _across(_last(len(e.params["fft_lengths"])))(e, inputs),
    "triangular_solve": _solved,
    # Entries change their places.
    **_each("squeeze transpose reshape expand_dims slice tile", _moved),
    "split": _split,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    # Over axes, which may be that of the rows.
    "reduce_sum": _sum,
    **_each("reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce_xor", _reduced),
    **_each("psum psum2 psum_invariant", _over_devices),
    **_each("dot_general conv_general_dilated", _multiplied),
    # By indices.
    "gather": _gathered,
    **_each("scatter scatter-add scatter-mul", _scattered),
    **_each("dynamic_slice dynamic_update_slice", _at),
    **HOLD_JAXPRS,
    "": _mapped,
}
