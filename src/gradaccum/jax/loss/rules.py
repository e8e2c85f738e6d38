"""What each primitive makes of the rows: one table from its name to its rule, `RULES` at the end."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from gradaccum.jax.loss import algebra
from gradaccum.jax.loss.algebra import NONE, SHARED, Flaw, Lost, Place, Term, Terms, Value, mixes, union, unknown
from gradaccum.jax.loss.walk import Equation, Rule, is_integral, joined

_ROUNDS = 6  # times that a loop's body is looked at until what is known of its carry stays
_COMPUTED: dict[str, Callable[..., Any]] = {
    "abs": abs, "add": operator.add, "add_any": operator.add, "and": operator.and_,
    "clamp": lambda a, x, b: min(max(a, x), b), "div": operator.truediv, "eq": operator.eq, "ge": operator.ge,
    "gt": operator.gt, "le": operator.le, "log": math.log, "lt": operator.lt, "max": max, "min": min,
    "mul": operator.mul, "ne": operator.ne, "neg": operator.neg, "not": operator.not_, "or": operator.or_,
    "pow": operator.pow, "rsqrt": lambda x: x**-0.5, "sqrt": lambda x: x**0.5, "square": lambda x: x * x,
    "sub": operator.sub,
}  # fmt: skip
"""What comes of numbers that are known in imagined batches."""


def _computed(inputs: list[Value], compute: Callable[..., Any] | None) -> list[Any] | None:
    """An output in each of the imagined batches, where all inputs are known there."""
    if compute is None or not inputs or any(value.lanes is None for value in inputs):
        return None

    def one(*numbers: Any) -> Any:
        try:
            found = compute(*numbers)
        except (ArithmeticError, TypeError, ValueError):
            return NONE
        is_none = isinstance(found, complex) or found != found or any(x != x for x in numbers)
        return NONE if is_none else found

    lanes = [one(*numbers) for numbers in zip(*(value.lanes or () for value in inputs))]
    return None if any(x != x for n, x in enumerate(lanes) if not algebra.is_empty(n)) else lanes


# Where an output has its rows, by the inputs; its axis is the one that grows with them.

Where = Callable[[Equation, list[Value]], Place | None]
Axes = Callable[[Equation], Collection[int]]


def _last(count: int) -> Axes:
    return lambda e: range(len(e.shapes[0]) - count, len(e.shapes[0]))


def _named(e: Equation) -> Collection[int]:
    names = ("axes", "axis", "dimension", "dimensions", "reduction_dimension")
    axes = next(e.params[name] for name in names if name in e.params)
    return [axis % len(e.shapes[0]) for axis in (axes if isinstance(axes, tuple | list) else (axes,))]


def _windows(e: Equation) -> Collection[int]:
    sizes = zip(e.params["window_dimensions"], e.params["window_strides"], e.params["padding"])
    return [axis for axis, (size, stride, padding) in enumerate(sizes) if (size, stride, *padding) != (1, 1, 0, 0)]


def _largest(e: Equation) -> Collection[int]:
    return _named(e) if {"axis", "dimension"} & {*e.params} else _last(1)(e)


def _solved(e: Equation) -> Collection[int]:
    """Of a right side each column (or row) by itself, if all rows share the matrix."""
    side = len(e.shapes[1]) - (2 if e.params["left_side"] else 1)
    return _last(2)(e) if e.values[0].depends else (side,)


def _reshaped(e: Equation, inputs: list[Value]) -> Place | None:
    old, new, order, place = e.shapes[0], e.outputs[0], e.params.get("dimensions"), inputs[0].place
    if place is None:
        return None
    if order is not None and e.name == "reshape":  # it transposes first, as `vmap` has it of convolutions
        place, old = place._replace(axis=order.index(place.axis)), tuple(old[axis] for axis in order)
    before, after = math.prod(old[: place.axis]) * place.outer, place.inner * math.prod(old[place.axis + 1 :])
    for axis, length in enumerate(new):
        ahead, behind = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if ahead and behind and before % ahead == 0 and after % behind == 0:
            outer, inner = before // ahead, after // behind
            if outer * e.walk.rows[-1] * inner == length:
                return Place(axis, outer, inner)
    raise mixes(algebra.FREE)  # groups of rows perhaps, which may be whole in each micro-batch


def _cut(e: Equation, place: Place, first: int, last: int, stride: int = 1) -> Place:
    """The rows from `first` to `last` of their axis: all of them, or whole blocks of them where it has several."""
    block = e.walk.rows[-1] * place.inner
    if (first, last, stride) == (0, e.shapes[0][place.axis], 1):
        return place
    if stride != 1 or first % block or last % block:
        raise mixes(algebra.MOVED)
    return place._replace(outer=(last - first) // block)


def _sliced(e: Equation, inputs: list[Value]) -> Place | None:
    if (place := inputs[0].place) is None:
        return None
    first, last = (e.params[name][place.axis] for name in ("start_indices", "limit_indices"))
    found = _cut(e, place, first, last, (e.params["strides"] or (1,) * len(e.shapes[0]))[place.axis])
    starts = zip(e.each("start_indices"), e.walk.rows)
    if any(start[place.axis] * e.walk.rows[-1] != first * rows for start, rows in starts):
        raise unknown("slice")
    return found


def _repeated(e: Equation, inputs: list[Value]) -> Place | None:
    """Of `broadcast_in_dim` and `tile`: what rows share becomes each row's, where the output grows with them."""
    grown, place = e.grown(), inputs[0].place
    if place is None:
        return grown
    if e.name == "tile":
        place = place._replace(outer=place.outer * e.params["reps"][place.axis])
    elif grown is None or grown.axis != e.params["broadcast_dimensions"][place.axis]:
        raise mixes(algebra.PAIRS)
    return place


def _concatenated(e: Equation, inputs: list[Value]) -> Place | None:
    places = [value.place for value in inputs if value.place is not None]
    along = bool(places) and places[0].axis == e.params["dimension"]
    if len({each._replace(outer=1) if along else each for each in places}) > 1:
        raise mixes()
    if along and len(places) < len(inputs):
        raise unknown("concatenate")
    return places[0]._replace(outer=sum(each.outer for each in places)) if along else next(iter(places), None)


def _part_of(e: Equation, inputs: list[Value]) -> Place | None:
    """Of `dynamic_slice` and `dynamic_update_slice`."""
    count = 1 if e.name == "dynamic_slice" else 2
    if not all(start.is_shared for start in inputs[count:]):
        raise unknown(e.name)
    place = algebra.common_place(inputs[:count])
    part = e.params["slice_sizes"] if count == 1 else e.shapes[1]
    if place is not None and part[place.axis] != e.shapes[0][place.axis]:
        raise mixes(algebra.MOVED if count == 1 else "")
    return place


def _dot(e: Equation, inputs: list[Value]) -> Place | None:
    left, right = (value.place for value in inputs)
    if left is not None and right is not None and left[1:] != right[1:]:
        raise mixes()
    return left or right  # pairs of rows grow twice, what is summed over them doesn't


def _convolution(e: Equation, inputs: list[Value]) -> Place | None:
    image, kernel = inputs[0].place, inputs[1].place
    return _convolved(e, image, kernel) if image or kernel else None


def _convolved(e: Equation, image: Place | None, kernel: Place | None) -> Place | None:
    """Rows in the image's batch; a kernel, and perhaps a group of the image, for each row; or features of both, which
    are summed over."""
    numbers, counts = e.params["dimension_numbers"], ("feature_group_count", "batch_group_count")
    features, parts = (e.params[name] for name in counts)  # one of them is 1
    grow = any(len({*e.each(name)}) > 1 for name in counts)
    if kernel is None:
        keeps = image is not None and image.axis == numbers.lhs_spec[0] and image.outer % parts == 0
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
        raise mixes()
    return kernel or image


# The terms of an output, by those of the inputs, which have rows in the same places.


def _linear(e: Equation, values: list[Value]) -> Terms:
    return union(values)


def _selected(e: Equation, values: list[Value]) -> Terms:
    which, *cases = values
    if (which.own and which.place is None) or any(term.scale for term in which.terms):
        return e.function(values)
    return frozenset(Term(term.own or which.own, term.scale) for term in union(cases))


def _rule(
    terms: Callable[[Equation, list[Value]], Terms] = Equation.function,
    where: Where = lambda e, inputs: algebra.common_place(inputs),
    across: Axes = lambda e: (),
    soft: str = "",
    compute: Callable[..., Any] | None = None,
) -> Rule:
    """An operation of the entries of each row, whose outputs have these terms, and their rows there; without an axis
    of rows they are sums over them. What works `across` the axis of the rows mixes them."""

    def rule(e: Equation, inputs: list[Value]) -> list[Value]:
        lanes = _computed(inputs, compute or _COMPUTED.get(e.name))
        if lanes is not None and terms is Equation.function:
            return [e.valued(lanes)]
        if any(value.flaw for value in inputs):
            return _flawed(e, inputs)
        rows, place = any(value.place for value in inputs), where(e, inputs)
        if place is not None and place.axis in across(e):
            raise mixes(soft)
        found = terms(e, [e.lifted(value, place) for value in inputs])
        if lanes is not None:
            return [e.valued(lanes, found)]
        if e.grown() is not None or not (rows or e.name == "reduce_sum"):
            return [e.made(inputs, found, e.placed(place, n), n) for n in range(len(e.outputs))]
        if terms in (_linear, Equation.product):
            return [e.walk.summed(e, inputs, found, rows)]
        raise unknown(e.name)

    return rule


def _flawed(e: Equation, inputs: list[Value]) -> list[Value]:
    return [e.made(inputs, SHARED, None, n) for n in range(len(e.outputs))]


def _layout(where: Where) -> Rule:
    """Entries change their places."""

    def rule(e: Equation, inputs: list[Value]) -> Value:
        value = inputs[0]
        if value.flaw is None and value.place is None and value.scalar:
            return e.lifted(value, where(e, inputs))
        (found,) = _rule(_linear, where)(e, inputs[:1])
        return found.but(lanes=value.lanes, scalar=found.scalar or value.scalar)

    return rule


_by_entries = _rule()


# Numbers that change what an operation is.


def _power(e: Equation, inputs: list[Value]) -> Any:
    degree = {"square": 2, "integer_pow": e.params.get("y")}.get(e.name, inputs[-1].known)
    if degree is None or (e.name == "pow" and degree not in (-2, -1, 2)):
        return _by_entries(e, inputs)
    compute = lambda x: x ** int(degree)  # noqa: E731
    return _rule(lambda e, values: e.power(values[0], int(degree)), compute=compute)(e, inputs[:1])


def _multiplied(e: Equation, inputs: list[Value]) -> Any:
    """`mul`, and `and`: 0 whatever the other is, if one is."""
    if any(value.known is not None and not value.known for value in inputs):
        scales = [value.lanes or term.scale for value in inputs for term in value.terms if value.lanes or term.scale]
        holes = [any(x != x for x in numbers) for numbers in zip(*scales)]
        return e.valued([NONE if hole else 0 for hole in holes] or 0 if e.name == "mul" else False)
    return _rule(Equation.product if e.name == "mul" else Equation.function)(e, inputs)


def _converted(e: Equation, inputs: list[Value]) -> Any:
    old, new = (variables[0].aval.dtype for variables in (e.traced[-1].invars, e.traced[-1].outvars))
    if not is_integral(new):
        return inputs[0]
    wide = new.itemsize >= 4 and np.can_cast(old, np.int64) and new.kind == "i"  # that they fit is taken for true
    if is_integral(old) and (np.can_cast(old, new) or wide):
        return inputs[0]
    return _rule(compute=bool if str(new) == "bool" else int)(e, inputs)


def _added(e: Equation, inputs: list[Value]) -> Any:
    for a, b in (inputs, inputs[::-1]):  # a shift of all rows by the largest may cancel out behind a logarithm
        flaw = b.flaw if a.place is not None and b.scalar else None
        if flaw is not None and flaw.certain and flaw.source.primitive in ("reduce_max", "reduce_min"):
            return e.made(inputs, SHARED, None).but(flaw=flaw._replace(soft=algebra.FREE))
    return _rule(_linear)(e, inputs)


def _compared(e: Equation, inputs: list[Value]) -> Any:
    a, b = inputs[0], inputs[-1]
    if e.name == "ne" and b.known == 0 and str(e.traced[-1].invars[0].aval.dtype) == "bool":
        return a  # as `count_nonzero` asks of a mask
    if e.name == "lt" and e.walk.is_position(a.number) and b.known == 0:
        return e.valued(False)
    if (e.name == "is_finite" or a.number == b.number) and a.place is None and a.flaw is None and a.own:
        # A number for all rows is taken to be finite, but where it is divided by a sum that is 0.
        scales = [term.scale for term in a.terms if term.scale]
        finite = [all(x == x for x in each) for each in zip(*scales)] if scales else True
        if e.name in ("is_finite", "eq", "le", "ge"):
            return e.valued(finite)
        return e.valued([not each for each in finite] if isinstance(finite, list) else False)
    return _by_entries(e, inputs)


def _select(e: Equation, inputs: list[Value]) -> Any:
    """`select_n`: one of several numbers, entry by entry."""
    return _chosen(e, inputs[0], inputs[1:]) if inputs[0].lanes is not None else _rule(_selected)(e, inputs)


def _chosen(e: Equation, which: Value, cases: Sequence[Any], n: int = 0) -> Value:
    """One of several numbers, by a condition that is known in imagined batches: each counts where it is chosen."""
    asked = which.lanes or ()
    picks = [int(x) if x == x else -1 for x in asked]
    given = {number: cases[number] for number in sorted({*picks} - {-1})}
    if len(given) == 1:
        return given.popitem()[1]
    e.walk.has_branches |= not algebra.is_by_rows(algebra.ordinary(tuple(1.0 + x for x in asked)))
    place = algebra.common_place(given.values())
    values = [e.lifted(value, place) for value in given.values()]
    counts = [[NONE if each < 0 else float(each == number) for each in picks] for number in given]
    terms = union(value.but(terms=algebra.counted(value.terms, each)) for value, each in zip(values, counts))
    if all(value.lanes is not None for value in values):
        return e.valued([given[number].lanes[n] if number in given else NONE for n, number in enumerate(picks)], terms)
    found = e.made(values, terms, e.placed(place, n), n)
    return found.but(roots=found.roots | which.roots)


def _extreme(e: Equation, inputs: list[Value]) -> Any:
    """The largest, the product, ...: of what is the same for all rows it may be of rows, too."""
    value = inputs[0]
    if value.axis in e.params["axes"] and not value.own and e.name not in ("argmax", "argmin"):
        if e.name in ("reduce_prod", "reduce_xor") and value.known != 1:
            raise Lost("count")
        return e.made(inputs, e.function([value]), None)
    if e.name == "reduce_or" and value.axis >= 0 and value.free and e.outputs[0] == ():  # whether a sum isn't 0
        total = e.walk.total(value)
        e.walk.sources |= {total: e.walk.sources.get(total, e.source), e.number: e.source}
        return e.valued([x != 0 for x in e.walk.batches.sum_at(total, value.but(integral=True))])
    return _rule(across=_named)(e, inputs)


def _iota(e: Equation, inputs: list[Value]) -> Value:
    place = e.grown()
    if place is None or place.axis != e.params["dimension"]:
        return e.made([], SHARED, place)
    e.walk.positions |= {e.number} if place[1:] == (1, 1) else set()
    return e.made([], SHARED, None).but(flaw=Flaw("position", e.source))


def _drawn(e: Equation, inputs: list[Value]) -> Value:
    """Random numbers, and keys, from a key: each row's own where its key is, or where micro-batches have their own."""
    key, *data = inputs
    # A state of random numbers is meant to move.
    place, roots = e.grown(), algebra.roots_of(inputs) & (algebra.STATE - 1)
    by_position = any(value.flaw is not None and value.flaw.kind == "position" for value in data)
    if key.flaw is None and key.place is None and (by_position or (place is not None and not any(v.own for v in data))):
        if roots & algebra.FRESH:
            return e.made([key], frozenset([Term(True)]), place).but(roots=roots)
        return e.made([key], SHARED, None).but(roots=roots, flaw=Flaw("random", e.source))
    if key.own:
        inputs = [key, *(value for value in data if value.flaw is None or value.flaw.kind != "position")]
    place = place or algebra.common_place(inputs)
    return e.made(inputs, e.function([e.lifted(value, place) for value in inputs]), place).but(roots=roots)


def _split(e: Equation, inputs: list[Value]) -> list[Value]:
    (value,), place = inputs, inputs[0].place
    along = place is not None and place.axis == e.params["axis"]
    if not along and len({tuple(sizes) for sizes in e.each("sizes")}) > 1:
        raise unknown("split")
    ends = itertools.pairwise(np.cumsum([0, *e.params["sizes"]]).tolist())
    places = [_cut(e, place, *pair) if place is not None and along else place for pair in ends]
    return [e.made(inputs, value.terms, each, n) for n, each in enumerate(places)]


# Sums over devices.


def _over_devices(e: Equation, inputs: list[Value]) -> Any:
    """`psum`: of a `vmap`'s axis, a sum over it; of a mesh's, of the parts that its devices have."""
    axes, split = e.params["axes"], e.walk.split
    if all(isinstance(axis, int) for axis in axes) and len(inputs) == 1:
        return _rule(_linear)(e, inputs)
    if any(isinstance(axis, int) for axis in axes) or e.params.get("axis_index_groups") is not None:
        raise unknown(e.name)

    def of_all(n: int, value: Value) -> Value:
        """The sum over devices: of all parts of a sum over rows, that sum."""
        if split & {*axes} and value.place is not None and value.own:
            raise mixes()
        if value.roots & algebra.LOCAL and {*axes} == split:
            return e.walk.as_sum(value.but(roots=value.roots & ~algebra.LOCAL))
        return e.made([value], value.terms, value.place, n)

    return [of_all(*pair) for pair in enumerate(inputs)]


# By indices.


def _by_position(e: Equation, indices: Value, axes: Sequence[int], rows: Place | None) -> list[Value] | None:
    """The other indices, if those along the rows are their positions: each row asks for itself."""
    name, params, *columns = e.walk.keys[indices.number]
    together = name == "concatenate" and dict(params)["dimension"] == repr(len(e.shapes[1]) - 1)
    columns = columns if together and len(columns) == len(axes) else [indices.number]
    asked = [column for axis, column in zip(axes, columns) if rows == Place(axis) and e.walk.is_position(column)]
    return [e.walk.values[column] for column in columns if column not in asked] if asked else None


def _indexed(e: Equation, inputs: list[Value]) -> Any:
    """`gather` and `scatter`: rows that stay whole, or that each have indices of their own, by position or in a batch
    axis; of what has no rows, entries for each row, and sums over them (histograms)."""
    (operand, indices, *updates), numbers, rows = inputs, e.params["dimension_numbers"], inputs[0].place
    to = numbers.scatter_dims_to_operand_dims if updates else numbers.start_index_map
    others = _by_position(e, indices, to, rows)
    data, by = [operand, *updates], [indices] if others is None else others
    if operand.place is None and operand.flaw is None and any(value.place is not None for value in updates):
        return _tallied(e, operand, updates[0], by)

    def where(e: Equation, used: list[Value]) -> Place | None:
        if rows is not None and others is None:
            _check_rows(e, rows, indices, used)
        return rows or indices.place

    def terms(e: Equation, values: list[Value]) -> Terms:
        data, by = values[: 1 + len(updates)], values[1 + len(updates) :]
        found = union(data[:1]) | e.product(data) if e.name == "scatter-mul" else union(data)
        own = any(term.own for term in e.function(by))
        return frozenset(Term(term.own or own, term.scale) for term in found)

    return _rule(terms, where)(e, [*data, *by])


def _check_rows(e: Equation, rows: Place, indices: Value, used: list[Value]) -> None:
    """Each row has indices of its own, or stays whole."""
    if rows.axis in e.params["dimension_numbers"].operand_batching_dims:
        if {value.place[1:] for value in used if value.place is not None} != {rows[1:]}:
            raise mixes()
    elif _part(e, rows.axis) != e.shapes[0][rows.axis]:
        raise mixes(algebra.MOVED if e.name == "gather" else "")
    elif indices.place is not None:
        raise mixes(algebra.PAIRS)


def _tallied(e: Equation, operand: Value, updates: Value, by: list[Value]) -> Value:
    """Sums over the rows, by each row's own indices."""
    if any(value.flaw is not None for value in (updates, *by)):
        return e.made([updates, *by], SHARED, None)
    in_windows = updates.axis in e.params["dimension_numbers"].update_window_dims
    if in_windows or not e.name.endswith("add") or not operand.terms <= SHARED:
        raise unknown(e.name)
    e.function(by)
    own = frozenset(Term(True, term.scale) for term in updates.terms)
    return e.walk.added_up(e, e.made([operand, updates, *by], operand.terms | own, None))


def _part(e: Equation, axis: int) -> int:
    """How much of this axis of the operand each index stands for."""
    if e.name == "gather":
        return int(e.params["slice_sizes"][axis])
    numbers = e.params["dimension_numbers"]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [each for each in range(len(e.shapes[0])) if each not in single]
    return e.shapes[2][numbers.update_window_dims[kept.index(axis)]] if axis in kept else 1


def _other(e: Equation, inputs: list[Value]) -> list[Value]:
    """Any other primitive is a function of what has no axis of rows."""
    if any(value.place is not None for value in inputs) or (e.walk.split and not inputs):
        raise unknown(e.name)
    return [e.made(inputs, e.function(inputs), None, n) for n in range(len(e.outputs))]


# Holding jaxprs.


def _called(e: Equation, inputs: list[Value]) -> list[Value]:
    name = next((name for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in e.params), None)
    if name is None:
        raise unknown(e.name)
    e.walk.callers.append((e.params.get("name", ""), e.info))
    try:
        return e.walk.run(e.each(name), inputs)
    finally:
        e.walk.callers.pop()


def _carry(e: Equation, body: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
    """What is known of a loop's carry in any round."""

    def facts(value: Value) -> Any:
        return value.terms, value.place, value.flaw and value.flaw[::2], value.roots

    numbers = [e.walk.number("carry", (id(e.traced[-1]), n), value.number) for n, value in enumerate(carry)]
    for _ in range(_ROUNDS):
        carry = [value.but(number=number, lanes=None) for number, value in zip(numbers, carry)]
        after = [joined(e.walk, *pair) for pair in zip(carry, body(carry))]
        if all(facts(a) == facts(b) for a, b in zip(carry, after)):
            return after
        carry = after
    raise unknown(e.name)


def _scanned(e: Equation, inputs: list[Value]) -> list[Value]:
    first, second = e.params["num_consts"], e.params["num_consts"] + e.params["num_carry"]
    consts, carry, entries = inputs[:first], inputs[first:second], inputs[second:]
    if any(value.axis == 0 for value in entries):
        return e.walk.run([_mapped(each, first, second) for each in e.traced], inputs)
    lengths = e.each("length")
    if len({*lengths}) > 1:
        raise unknown(f"{lengths[0]} rounds for {e.walk.rows[0]} rows")
    entries = [_entry(value, e.walk.number("entry", None, value.number), -1) for value in entries]

    def body(carry: list[Value]) -> list[Value]:
        return e.walk.run(e.each("jaxpr"), [*consts, *carry, *entries])

    carry = _carry(e, lambda carry: body(carry)[: len(carry)], carry)
    return [*carry, *(_entry(value, value.number, 1) for value in body(carry)[len(carry) :])]


def _entry(value: Value, number: int, axes: int) -> Value:
    """What one round of a scan gets of an array, with an axis less, or has as its part of one, with an axis more."""
    place = value.place and value.place._replace(axis=value.axis + axes)
    return value.but(number=number, place=place, scalar=False, lanes=None)


def _mapped(traced: Any, first: int, second: int) -> Any:
    """A scan over rows as `vmap` has it, whose carry is a sum over them: each round adds to it."""
    closed = traced.params["jaxpr"]
    for before, after in zip(closed.jaxpr.invars[first:second], closed.jaxpr.outvars):
        users = [each for each in closed.jaxpr.eqns for variable in each.invars if variable is before]
        adds = [each.primitive.name in ("add", "add_any") and each.outvars == [after] for each in users]
        if adds != [True] or any(before is each for each in closed.jaxpr.outvars):
            raise unknown("scan over rows")

    def rows(*given: Any) -> list[Any]:
        carry = given[first:second]
        begin = [jnp.zeros_like(each) for each in carry]
        axes = [None] * second + [0] * (len(given) - second)
        found = jax.vmap(jaxpr_as_fun(closed), axes)(*given[:first], *begin, *given[second:])
        return [*(a + b.sum(0) for a, b in zip(carry, found)), *found[len(carry) :]]

    return jax.make_jaxpr(rows)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.invars))


def _looped(e: Equation, inputs: list[Value]) -> list[Value]:
    first, second = e.params["cond_nconsts"], e.params["cond_nconsts"] + e.params["body_nconsts"]
    body = e.each("body_jaxpr")
    carry = _carry(e, lambda carry: e.walk.run(body, [*inputs[first:second], *carry]), inputs[second:])
    (goes_on,) = e.walk.run(e.each("cond_jaxpr"), [*inputs[:first], *carry])
    if not goes_on.is_shared:
        raise unknown("while")
    return carry


def _branched(e: Equation, inputs: list[Value]) -> list[Value]:
    which, *rest = inputs
    branches = list(zip(*e.each("branches")))
    if which.lanes is not None:
        chosen = {int(x) for x in which.lanes if x == x}
        each = [e.walk.run(branch, rest) if n in chosen else [] for n, branch in enumerate(branches)]
        return [_chosen(e, which, [some[n] if some else None for some in each], n) for n in range(len(e.outputs))]
    if not which.is_shared:
        raise unknown("cond")
    found, *others = (e.walk.run(each, rest) for each in branches)
    for other in others:
        found = [joined(e.walk, *pair) for pair in zip(found, other)]
    return [value.but(roots=value.roots | which.roots) for value in found]


def _on_devices(e: Equation, inputs: list[Value]) -> list[Value]:
    """`shard_map`: the same on each device, for the rows that it has, whose sums are parts of the batch's."""
    walk, specs = e.walk, e.params["in_specs"]
    splits = {_mesh_axes(spec, value.axis) for value, spec in zip(inputs, specs) if value.place} or {frozenset()}
    split = next(iter(splits))
    count = math.prod(e.params["mesh"].shape[name] for name in split)
    apart = count > 1 and any(_is_by_device(value, spec, split) for value, spec in zip(inputs, specs))
    if len(splits) > 1 or walk.split or apart or any(value.flaw for value in inputs):
        raise unknown(e.name)
    rows, walk.split = walk.rows, split if count > 1 else walk.split
    walk.rows = tuple(each // count for each in rows)
    try:
        found = walk.run(e.each("jaxpr"), inputs)
    finally:
        walk.rows, walk.split = rows, frozenset()
    for value, spec in zip(found, e.params["out_specs"]) if count > 1 else ():
        _check_joined(value, spec, split)
    return found


def _mesh_axes(spec: Any, axis: int) -> frozenset[str]:
    """The axes of the devices over which this axis of an array is split."""
    part = spec[axis] if 0 <= axis < len(spec) else None
    return frozenset(part if isinstance(part, tuple) else () if part is None else (part,))


def _is_by_device(value: Value, spec: Any, split: frozenset[str]) -> bool:
    """Whether each row gets what its device has of an array without rows; or there are several rows for one."""
    if value.place is None:
        return any(split & _mesh_axes(spec, axis) for axis in range(len(spec)))
    return value.place[1:] != (1, 1)


def _check_joined(value: Value, spec: Any, split: frozenset[str]) -> None:
    """An output has the devices' rows behind each other, or none and the same on all devices."""
    elsewhere = value.place is not None and _mesh_axes(spec, value.axis) != split
    if value.flaw is None and (elsewhere or value.roots & algebra.LOCAL):
        raise mixes(algebra.FREE)


def _solves(e: Equation, inputs: list[Value]) -> list[Value]:
    """`custom_linear_solve`: what it solves with; its derivative is that of the solution."""
    lengths = e.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    solve = [*inputs[start : start + lengths.solve], *inputs[sum(n or 0 for n in lengths) :]]
    return e.walk.run([each.solve for each in e.each("jaxprs")], solve)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    "": _other,
    **_each(
        "copy copy_p reduce_precision optimization_barrier pcast pvary pbroadcast reshard name "
        "sharding_constraint random_wrap random_unwrap device_put mesh_cast",
        lambda e, inputs: list(inputs),
    ),
    "stop_gradient": lambda e, inputs: [value.but(roots=value.roots & ~algebra.FLOWING) for value in inputs],
    # Entry by entry.
    **_each(
        "abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz "
        "cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac le_to lgamma "
        "log log1p logistic lt_to min nextafter not or polygamma population_count random_gamma_grad "
        "regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin "
        "sinh sqrt tan tanh xor zeta",
        _by_entries,
    ),
    "max": lambda e, inputs: inputs[1] if inputs[0].known == -np.inf else _by_entries(e, inputs),
    **_each("add add_any sub", _added),
    **_each("neg complex real imag conj stack", _rule(_linear)),
    **_each("mul and", _multiplied),
    "div": _rule(Equation.quotient),
    **_each("square integer_pow pow", _power),
    **_each("eq ne lt le gt ge is_finite", _compared),
    "select_n": _select,
    "convert_element_type": _converted,
    "iota": _iota,
    **_each("random_bits random_split random_fold_in", _drawn),
    # Across some axes, and entry by entry on the others.
    "cumsum": _rule(_linear, across=_named),
    **_each("cumprod cummax cummin cumlogsumexp approx_top_k", _rule(across=_named)),
    "sort": _rule(across=_named, soft=algebra.MOVED),
    "rev": _rule(_linear, across=_named, soft=algebra.MOVED),
    "pad": _rule(_linear, across=lambda e: [n for n, each in enumerate(e.params["padding_config"]) if any(each)]),
    "reduce_window_sum": _rule(_linear, across=_windows),
    **_each("reduce_window_max reduce_window_min reduce_window", _rule(across=_windows)),
    "top_k": _rule(across=_largest),
    **_each("cholesky eigh eig lu qr svd", _rule(across=_last(2))),
    "fft": _rule(_linear, across=lambda e: _last(len(e.params["fft_lengths"]))(e)),
    "triangular_solve": _rule(across=_solved),
    **_each("reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce_xor", _extreme),
    # Entries change their places.
    **_each("squeeze transpose", _layout(lambda e, inputs: inputs[0].place)),
    **_each("expand_dims reshape", _layout(_reshaped)),
    "slice": _layout(_sliced),
    "split": _split,
    **_each("broadcast_in_dim tile", _layout(_repeated)),
    "concatenate": _rule(_linear, _concatenated),
    # Sums, which may be over the rows.
    "reduce_sum": _rule(_linear),
    **_each("psum psum2 psum_invariant", _over_devices),
    "dot_general": _rule(Equation.product, _dot),
    "conv_general_dilated": _rule(Equation.product, _convolution),
    # By indices.
    **_each("gather scatter scatter-add scatter-mul", _indexed),
    "dynamic_slice": _rule(lambda e, values: union(values[:1]), _part_of),
    "dynamic_update_slice": _rule(lambda e, values: union(values[:2]), _part_of),
    # Holding jaxprs.
    **_each(
        "pjit jit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr",
        _called,
    ),
    "scan": _scanned,
    "while": _looped,
    "cond": _branched,
    "shard_map": _on_devices,
    "custom_linear_solve": _solves,
}
