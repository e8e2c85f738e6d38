"""What primitives that work across axes make of the rows: they move, add up, multiply, cut, join and pick entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

import numpy as np

from gradaccum.jax.loss.domain import (
    LIFTED,
    SHARED,
    CannotTell,
    MixesRows,
    Place,
    Symbol,
    Term,
    Value,
    common_place,
    function,
    lifted,
    moved,
    of,
    power_of,
    product,
    settled,
    shift_of,
    summed,
    symbols_of,
    union,
)  # fmt: skip
from gradaccum.jax.loss.interpreter import Equation, Interpreter, Known, Rule

__all__ = ["AXIS_RULES"]

Axes = Callable[[Equation], Collection[int]]


def _across(axes: Axes, how: str = "function", mixes: str = "mixed") -> Rule:
    """An operation that works across these axes of its inputs, and on the others entry by entry."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        place = common_place(inputs)
        if place is not None and place != LIFTED and place.axis in axes(equation):
            raise MixesRows(mixes)
        values = [lifted(value, place, equation.source) for value in inputs]
        if how == "function":
            terms = function(values, equation.source, equation.number)
        else:
            found = union(values)
            terms = moved(found, equation.number) if how == "move" else settled(found, equation.number)
        made = [
            walk.made(equation, inputs, terms, walk.placed(equation, place, n), n) for n in range(len(equation.outputs))
        ]
        if equation.name == "rev":
            _belongs(walk, made[0], inputs[0])
        return list(made)

    return rule


def _belongs(walk: Interpreter, found: Value, value: Value) -> None:
    """Remember that the sum of all of `found` is the sum of all of `value`."""
    walk.whole_of[found.number] = walk.whole_of.get(value.number, value.number)


def _last(count: int) -> Axes:
    return lambda equation: range(len(equation.shapes[0]) - count, len(equation.shapes[0]))


def _axis(equation: Equation) -> Collection[int]:
    return (equation.params["axis"] if "axis" in equation.params else equation.params["dimension"],)


def _solved(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """`triangular_solve`: each column (or row) of the right side by itself, where the matrix is none of rows."""
    matrix, _ = inputs
    rank = len(equation.shapes[1])
    axis = rank - 2 if equation.params["left_side"] else rank - 1
    if matrix.place is None:
        return _across(lambda _: (axis,))(walk, equation, inputs)
    return _across(_last(2))(walk, equation, inputs)


def _windows(equation: Equation) -> Collection[int]:
    params = equation.params
    sizes = zip(params["window_dimensions"], params["window_strides"])
    return [axis for axis, pair in enumerate(sizes) if pair != (1, 1)]


def _moving(place_of: Callable[[Interpreter, Equation, Place], Place | None]) -> Rule:
    """An operation that moves entries, alike for all rows; `place_of` says where the rows go."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        (value,) = inputs
        place = value.place if value.place in (None, LIFTED) else place_of(walk, equation, value.place)
        permutes = equation.name == "transpose" or (equation.name == "reshape" and equation.params["dimensions"])
        alone = equation.outputs[0] == equation.shapes[0] and not permutes
        found = walk.made(equation, inputs, moved(value.terms, equation.number), place)
        if value.scalar or alone:
            found = found.but(terms=value.terms, number=value.number, scalar=value.scalar, core=value.core)
        elif equation.name != "slice":
            _belongs(walk, found, value)
        return [found.but(values=value.values, position=value.position and place == Place(0))]

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


def _split(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    (value,), axis = inputs, equation.params["axis"]
    ends = np.cumsum([0, *equation.params["sizes"]]).tolist()
    found: list[Known] = []
    for n, (first, last) in enumerate(itertools.pairwise(ends)):
        place = value.place
        if place is not None and place.axis == axis:
            place = _cut(walk, place, first, last, equation.shapes[0][axis])
        elif equation.params["sizes"] != equation.other_params["sizes"]:
            raise CannotTell("split")
        found.append(walk.made(equation, inputs, moved(value.terms, (equation.number, n)), place, n))
    return found


def _broadcast(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    value = inputs[0]
    made = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    place = value.place
    if place is not None and place != LIFTED:
        place = place._replace(axis=equation.params["broadcast_dimensions"][place.axis])
    if place is not None and (made is None or place == LIFTED) is not (place == LIFTED and made is None):
        raise MixesRows("pairs")
    if place not in (None, LIFTED) and made is not None and made.axis != place.axis:
        raise MixesRows("pairs")
    if place is None and made is not None:
        value, place = lifted(value, made, equation.source), made
    found = walk.made(equation, inputs, value.terms if value.scalar else moved(value.terms, equation.number), place)
    if value.scalar:
        found = found.but(number=value.number, scalar=True, values=value.values, core=value.core)
    is_entry = bool(equation.outputs[0]) and equation.outputs[0][-1] == 1
    return [found.but(position=value.position, parts=(value,) if is_entry else None)]


def _concatenated(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    axis, places = equation.params["dimension"], [value.place for value in inputs]
    place = next((each for each in places if each is not None), None)
    if place is not None and place != LIFTED:
        if len({each._replace(outer=1) for each in places if each is not None}) > 1:
            raise MixesRows("mixed")
        if place.axis == axis and None in places:
            raise CannotTell("concatenate")
        if place.axis == axis:
            place = place._replace(outer=sum(each.outer for each in places if each is not None))
        elif len(set(places) - {None}) > 1:
            raise MixesRows("mixed")
    values = [lifted(value, place, equation.source) for value in inputs]
    found = walk.made(equation, inputs, moved(union(values), equation.number), place)
    parts = tuple(value.parts[0] for value in inputs if value.parts is not None and len(value.parts) == 1)
    whole = len(parts) == len(inputs) and axis == len(equation.outputs[0]) - 1
    return [found.but(parts=parts if whole else None)]


def _stacked_up(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    place = common_place(inputs)
    values = [lifted(value, place, equation.source) for value in inputs]
    terms = moved(union(values), equation.number)
    return [walk.made(equation, inputs, terms, walk.placed(equation, place))]


# Reductions.


def _sum(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    (value,), place = inputs, inputs[0].place
    whole = walk.whole_of.get(value.number, value.number)
    over_rows = place is not None and place != LIFTED and place.axis in equation.params["axes"]
    terms = (summed if over_rows else settled)(value.terms, equation.number)
    found = walk.made(equation, inputs, terms, None if over_rows else walk.placed(equation, place))
    found = found.but(local=found.local or (over_rows and bool(walk.split)))
    if equation.outputs[0] == ():
        found = found.but(number=walk.number("sum", whole))
        if isinstance(whole, tuple):  # of the rows of one device
            walk.totals[found.number] = walk.number("sum", whole[1])
    else:
        walk.whole_of[found.number] = whole
    mine = found.number, equation.source
    if over_rows or found.sums or (equation.outputs[0] == () and value.own and place is None):
        sums = value.sums | {mine} if over_rows or value.sums else value.sums
        return [found.but(sums=sums, core=mine if mine in sums else None)]
    return [found]


def _reduced(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """The largest, the product, ...: of what is the same for all rows it may be of rows, too."""
    value, place = inputs[0], inputs[0].place
    linear = equation.name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
    if place is None or place == LIFTED or place.axis not in equation.params["axes"]:
        place = walk.placed(equation, place)
        if linear and place is not None and len({term.factor for term in value.terms}) == 1:
            terms = power_of(value, Fraction(1), equation.source, equation.number)
        elif linear and shift_of(value) is not None:
            terms = value.terms
        else:
            terms = function([value], equation.source, equation.number)
        terms = settled(terms, equation.number)
        return [walk.made(equation, inputs, terms, place, n) for n in range(len(equation.outputs))]
    if linear and not value.own:
        return [walk.made(equation, inputs, value.terms, None)]
    alone = equation.outputs[0] == ()
    symbol = Symbol(equation.number, "mixed", value.free, alone, equation.source, equation.number)
    terms = of(symbol._replace(positive=value.positive))
    asks = value.free and equation.name == "reduce_or" and alone
    guard = walk.number("sum", walk.whole_of.get(value.number, value.number)) if asks else None
    return [
        walk.made(equation, inputs, terms, None, n).but(guard=guard, local=bool(walk.split))
        for n in range(len(equation.outputs))
    ]


def _over_devices(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """`psum`: of a `vmap`'s axis, a sum over it; of a mesh's, of the parts that its devices have."""
    axes = equation.params["axes"]
    if any(isinstance(axis, int) for axis in axes):
        if len(inputs) > 1 or not all(isinstance(axis, int) for axis in axes):
            raise CannotTell(equation.name)
        return _sum(walk, equation, inputs)
    return [_total(walk, value, bool(walk.split & set(axes)), walk.split <= set(axes)) for value in inputs]


def _total(walk: Interpreter, value: Value, adds_rows: bool, of_all: bool) -> Value:
    if not adds_rows:
        core = value.core and (walk.number("psum", value.core[0]), value.core[1])
        return value if value.values else value.but(number=walk.number("psum", value.number), core=core)
    if value.place is not None and value.own:
        raise MixesRows("mixed")
    number = walk.totals.get(value.number, walk.number("psum", value.number))
    core = value.core and (walk.totals.get(value.core[0], walk.number("psum", value.core[0])), value.core[1])
    return value.but(number=number, core=core, local=value.local and not of_all)


def _multiplied(where: Callable[[Place | None, Place | None, Equation], tuple[Place | None, bool]]) -> Rule:
    """Sums of products: `where` says where their rows are, and whether they are summed over them."""

    def rule(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
        left, right = inputs
        place: Place | None = None
        over_rows = False
        if LIFTED in (left.place, right.place):
            place = common_place([value.but(terms=frozenset([Term(True)])) for value in inputs])
        elif left.place is not None or right.place is not None:
            place, over_rows = where(left.place, right.place, equation)
        with_rows = left.place or right.place
        left, right = (lifted(value, with_rows, equation.source) for value in inputs)
        terms = product(left, right, equation.source)
        found = walk.made(equation, inputs, (summed if over_rows else settled)(terms, equation.number), place)
        mine = found.number, equation.source
        if not over_rows:
            return [found]
        return [found.but(sums=found.sums | {mine}, core=mine, local=found.local or bool(walk.split))]

    return rule


def _contracted(left: Place | None, right: Place | None, equation: Equation) -> tuple[Place | None, bool]:
    contract, batch = equation.params["dimension_numbers"]
    if left is not None and right is not None:
        for pairs, is_sum in ((batch, False), (contract, True)):
            if left.axis in pairs[0] and right.axis == pairs[1][pairs[0].index(left.axis)]:
                if left[1:] != right[1:]:
                    raise MixesRows("mixed")
                return (None, True) if is_sum else (left._replace(axis=pairs[0].index(left.axis)), False)
        free = left.axis not in (*contract[0], *batch[0]) and right.axis not in (*contract[1], *batch[1])
        raise MixesRows("pairs" if free else "mixed")
    place, side = (left, 0) if left is not None else (right, 1)
    assert place is not None
    if place.axis in contract[side] or place.axis in batch[side]:
        raise CannotTell("dot_general")
    free_axes = [axis for axis in range(len(equation.shapes[side])) if axis not in (*contract[side], *batch[side])]
    start = len(batch[0]) + side * (len(equation.shapes[0]) - len(contract[0]) - len(batch[0]))
    return place._replace(axis=start + free_axes.index(place.axis)), False


def _convolved(left: Place | None, right: Place | None, equation: Equation) -> tuple[Place | None, bool]:
    """Of image and kernel."""
    numbers = equation.params["dimension_numbers"]
    groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]  # one of them is 1
    found: Any = None
    if right is None and left is not None:
        found = _of_image(left, equation)
    elif right is not None and right.axis == numbers.rhs_spec[0]:
        found = _of_kernel(left, right, equation, groups)
    elif right is not None and left is not None and right.axis == numbers.rhs_spec[1]:
        group = right.outer * equation.params["feature_group_count"]
        if left == Place(numbers.lhs_spec[1], group, right.inner):
            return None, True
    if found is None:
        raise MixesRows("mixed")
    return found, False


def _of_image(place: Place, equation: Equation) -> Place | None:
    """Rows in the image alone: each by itself as a row of the batch, or in an axis of space with a window of 1."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    (batch, _, *space), (_, _, *window), (out_batch, _, *out_space) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    if place.axis == batch and place.outer % params["batch_group_count"] == 0:
        return Place(out_batch, place.outer // params["batch_group_count"], place.inner)
    if place.axis in space:
        n = space.index(place.axis)
        alone = equation.shapes[1][window[n]] == params["window_strides"][n] == params["lhs_dilation"][n] == 1
        return place._replace(axis=out_space[n]) if alone and tuple(params["padding"][n]) == (0, 0) else None
    return None


def _of_kernel(left: Place | None, right: Place, equation: Equation, groups: int) -> Place | None:
    """A kernel for each row; with rows in the image, too, where each row is a group of its own."""
    numbers, params = equation.params["dimension_numbers"], equation.params
    names = "feature_group_count", "batch_group_count"
    grow = any(params[name] != equation.other_params[name] for name in names)
    _, outer, inner = right
    if left is None:
        return right._replace(axis=numbers.out_spec[1]) if not grow and outer % groups == 0 else None
    if grow and left.axis == numbers.lhs_spec[1 if params["batch_group_count"] == 1 else 0]:
        length = equation.shapes[0][left.axis] // groups  # of a group, which is a row's
        of_each = equation.shapes[1][numbers.rhs_spec[0]] // groups
        if left.outer == outer and left.inner * of_each == inner * length:
            return right._replace(axis=numbers.out_spec[1])
    return None


# By indices.


def _gathered(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    operand, indices = inputs
    place: Place | None = None
    if LIFTED in (operand.place, indices.place):
        place = common_place([value.but(terms=frozenset([Term(True)])) for value in inputs])
    elif operand.place is not None or indices.place is not None:
        place = _place_gathered(operand.place, indices, equation)
    kinds = {symbol.kind for symbol in symbols_of(indices)}
    odd = kinds - {"position"} or (kinds and operand.place is None) or (indices.place is None and indices.own)
    operand = lifted(operand, place, equation.source)
    own = indices.place is not None
    terms = frozenset(Term(term.own or own, term.factor) for term in moved(operand.terms, equation.number))
    if odd:
        terms = function([operand, lifted(indices, place, equation.source)], equation.source, equation.number)
    return [walk.made(equation, inputs, terms, place)]


def _place_gathered(operand: Place | None, indices: Value, equation: Equation) -> Place | None:
    """Where the result has its rows: those of the indices, or those that the operand has in an axis it keeps whole."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    batch_axes = [axis for axis in range(len(equation.outputs[0])) if axis not in numbers.offset_dims]
    asked = None if indices.place is None else indices.place._replace(axis=batch_axes[indices.place.axis])
    if operand is None:
        return asked
    axis = operand.axis
    if axis in numbers.operand_batching_dims:
        other = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        if indices.place != operand._replace(axis=other):
            raise MixesRows("mixed")
        return asked
    if sizes[axis] == equation.shapes[0][axis]:
        if asked is not None:
            raise MixesRows("pairs")
        dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [n for n in range(len(equation.shapes[0])) if n not in dropped]
        return operand._replace(axis=numbers.offset_dims[kept.index(axis)])
    if axis in numbers.start_index_map and sizes[axis] == 1 and operand[1:] == (1, 1):
        n = numbers.start_index_map.index(axis)
        of_axis = indices.parts[n] if indices.parts is not None and n < len(indices.parts) else indices
        if of_axis.position:
            return asked
    raise MixesRows("order" if asked is not None else "some")


def _scattered(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """Sums into an array that has no rows (counts, histograms), and what is put at the same place of all rows."""
    operand, indices, updates = inputs
    numbers = equation.params["dimension_numbers"]
    rows = operand.place
    if rows not in (None, LIFTED) and rows.axis in numbers.operand_batching_dims:
        other = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(rows.axis)]
        batch_axes = [n for n in range(len(equation.shapes[2])) if n not in numbers.update_window_dims]
        wanted = rows._replace(axis=other), rows._replace(axis=batch_axes[other])
        if (
            any(v.place not in (None, place) for v, place in zip((indices, updates), wanted))
            or equation.name == "scatter"
        ):
            raise CannotTell(equation.name)
        if symbols_of(indices):
            raise CannotTell(equation.name)
        values = [lifted(value, rows, equation.source) for value in (operand, updates)]
        terms = frozenset(Term(term.own or indices.own, term.factor) for term in union(values))
        return [walk.made(equation, inputs, moved(terms, equation.number), rows)]
    if indices.is_shared:
        return _put(walk, equation, operand, updates)
    plain = not symbols_of(indices) and not operand.terms - SHARED
    if (
        rows is not None
        or not equation.name.endswith("add")
        or indices.place is None
        or updates.place is None
        or not plain
    ):
        raise CannotTell(equation.name)
    own = settled(frozenset(Term(True, term.factor) for term in updates.terms), equation.number, over_rows=True)
    found = walk.made(equation, inputs, operand.terms | own, None)
    mine = found.number, equation.source
    return [found.but(sums=found.sums | {mine}, core=mine, local=bool(walk.split))]


def _put(walk: Interpreter, equation: Equation, operand: Value, updates: Value) -> list[Known]:
    numbers = equation.params["dimension_numbers"]
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(equation.shapes[0])) if axis not in taken]
    of_updates = dict(zip(numbers.update_window_dims, kept))
    found, rows = updates.place, operand.place
    if found is not None and found != LIFTED:
        if found.axis not in of_updates:
            raise MixesRows("mixed")
        found = found._replace(axis=of_updates[found.axis])
    if rows is not None and rows != LIFTED and rows.axis not in kept:
        raise MixesRows("mixed")
    values = [operand, updates.but(place=found)]
    place = common_place(values)
    if equation.name not in ("scatter", "scatter-add", "scatter-mul"):
        raise CannotTell(equation.name)
    if place is not None and place != LIFTED:
        part = next(axis for axis, where in of_updates.items() if where == place.axis)
        if equation.shapes[2][part] != equation.shapes[0][place.axis]:
            raise MixesRows("mixed")
    values = [lifted(value, place, equation.source) for value in values]
    terms = union(values)
    if equation.name == "scatter-mul":
        terms = values[0].terms | product(values[0], values[1], equation.source)
    return [walk.made(equation, values, moved(terms, equation.number), place)]


def _at(walk: Interpreter, equation: Equation, inputs: list[Value]) -> list[Known]:
    """`dynamic_slice` and `dynamic_update_slice`."""
    count = 1 if equation.name == "dynamic_slice" else 2
    values, starts = inputs[:count], inputs[count:]
    place = common_place(values)
    if any(not start.is_shared for start in starts):
        raise CannotTell(equation.name)
    part = equation.params["slice_sizes"] if count == 1 else equation.shapes[1]
    if place is not None and place != LIFTED and part[place.axis] != equation.shapes[0][place.axis]:
        raise MixesRows("some" if count == 1 else "mixed")
    values = [lifted(each, place, equation.source) for each in values]
    return [walk.made(equation, inputs, moved(union(values), equation.number), place)]


_MATRICES = (
    "cholesky", "eigh", "eig", "lu", "qr", "svd", "geqrf", "householder_product", "schur", "tridiagonal_solve",
)  # fmt: skip

AXIS_RULES: dict[str, Rule] = {
    "cumsum": _across(_axis, "sum"),
    **{name: _across(_axis) for name in ("cumprod", "cummax", "cummin", "cumlogsumexp")},
    "sort": _across(_axis, mixes="order"),
    "rev": _across(lambda e: e.params["dimensions"], "move", "order"),
    "pad": _across(lambda e: [n for n, each in enumerate(e.params["padding_config"]) if any(each)], "move"),
    "reduce_window_sum": _across(_windows, "sum"),
    **{name: _across(_windows) for name in ("reduce_window_max", "reduce_window_min", "reduce_window")},
    **dict.fromkeys(("top_k", "approx_top_k", "lu_pivots_to_permutation"), _across(_last(1))),
    **dict.fromkeys(_MATRICES, _across(_last(2))),
    "triangular_solve": _solved,
    "fft": lambda w, e, i: _across(_last(len(e.params["fft_lengths"])))(w, e, i),
    "transpose": _moving(lambda w, e, p: p._replace(axis=e.params["permutation"].index(p.axis))),
    "squeeze": _moving(lambda w, e, p: w.placed(e, p)),
    "reshape": _moving(_reshaped),
    "expand_dims": _moving(_reshaped),
    "slice": _moving(_sliced),
    "split": _split,
    "tile": _moving(lambda w, e, p: p._replace(outer=p.outer * e.params["reps"][p.axis])),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "stack": _stacked_up,
    "reduce_sum": _sum,
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), _over_devices),
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin", "reduce_xor"),
        _reduced,
    ),
    "dot_general": _multiplied(_contracted),
    "conv_general_dilated": _multiplied(_convolved),
    "gather": _gathered,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul"), _scattered),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _at),
}
