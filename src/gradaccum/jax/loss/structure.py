"""Operations that move, add up, multiply, cut and join axes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from gradaccum.jax.loss import places
from gradaccum.jax.loss.algebra import common_place, function, lifted, power_of, product, settled, summed, union
from gradaccum.jax.loss.values import LIFTED, CannotTell, Known, MixesRows, Place, Symbol, Term
from gradaccum.jax.loss.walk import CONSTANT, Equation, Rule, Value, Walk

__all__ = ["STRUCTURE_RULES"]

Moved = Callable[[Place, Equation, int], Place]


def _moved(move: Moved) -> Rule:
    """A rule for an operation that keeps all numbers, or takes some of them, alike for all rows."""

    def rule(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
        value = inputs[0]
        place = value.place
        if place is not None and place != LIFTED:
            place = move(place, equation, walk.rows[0])
        permutes = equation.name == "transpose" or (equation.name == "reshape" and equation.params["dimensions"])
        alone = equation.outputs[0] == equation.shapes[0] and not permutes
        found = walk.made(equation, inputs, value.terms, place)
        if value.scalar or alone:
            found = found.but(number=value.number, scalar=value.scalar, core=value.core)
        elif equation.name != "slice":
            walk.whole_of[found.number] = walk.whole_of.get(value.number, value.number)
        return [found.but(values=value.values, position=value.position and place == Place(0))]

    return rule


def _broadcast(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    value = inputs[0]
    made = walk.place_by_shapes(equation.outputs[0], equation.other_outputs[0])
    place = value.place
    if place is not None and place != LIFTED:
        place = places.broadcast(place, equation.params["broadcast_dimensions"])
        if made is None or made.axis != place.axis:
            raise MixesRows("broadcast_in_dim")
    elif made is not None:
        if place == LIFTED:
            raise MixesRows("broadcast_in_dim")
        value, place = lifted(value, made, equation.source), made
    found = walk.made(equation, inputs, value.terms, place)
    if value.scalar:
        found = found.but(number=value.number, scalar=True, values=value.values, core=value.core)
    size = len(equation.outputs[0])
    return [found.but(position=value.position, parts=(value,) if size and equation.outputs[0][-1] == 1 else None)]


def _concatenated(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    dimension = equation.params["dimension"]
    given = [value.place for value in inputs]
    if all(place is None for place in given):
        place = None
    elif any(place == LIFTED for place in given):
        place = common_place(inputs)
        inputs = [lifted(value, place, equation.source) for value in inputs]
    else:
        place = places.concatenated(given, dimension)
        inputs = [lifted(value, place, equation.source) for value in inputs]
    found = walk.made(equation, inputs, union(inputs), place)
    parts = tuple(value.parts[0] for value in inputs if value.parts is not None and len(value.parts) == 1)
    whole = len(parts) == len(inputs) and dimension == len(equation.outputs[0]) - 1
    return [found.but(parts=parts if whole else None)]


def _stacked(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    place = common_place(inputs)
    inputs = [lifted(value, place, equation.source) for value in inputs]
    after = place is not None and place != LIFTED and place.axis >= equation.params["axis"]
    moved = place._replace(axis=place.axis + 1) if after and place is not None else place
    return [walk.made(equation, inputs, union(inputs), moved)]


def _padded(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    value, filler = inputs
    rows = value.place if value.place != LIFTED else None
    if rows is not None and any(equation.params["padding_config"][rows.axis]):
        raise MixesRows("pad")
    filler = lifted(filler, value.place, equation.source)
    return [walk.made(equation, inputs, union([value, filler]), value.place)]


def _summed(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    (value,) = inputs
    axes = equation.params["axes"]
    whole = walk.whole_of.get(value.number, value.number)
    if value.place is None or value.place == LIFTED or value.place.axis not in axes:
        place = value.place
        if place is not None and place != LIFTED:
            place = places.reduced(place, axes)
        found = walk.made(equation, inputs, settled(value.terms), place)
    else:
        found = walk.made(equation, inputs, summed(value.terms), None)
        found = found.but(sums=found.sums | {(found.number, equation.source)})
    if equation.outputs[0] == ():
        number = walk.number("sum", whole)
        sums = found.sums - {(found.number, equation.source)}
        found = found.but(number=number, sums=sums | {(number, equation.source)} if sums != found.sums else sums)
    else:
        walk.whole_of[found.number] = whole
    mine = found.number, equation.source
    return [found.but(core=mine) if mine in found.sums else found]


def _as_sum(found: Known, equation: Equation) -> Known:
    return found.but(sums=found.sums | {(found.number, equation.source)}, core=(found.number, equation.source))


def _reduced(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """The largest, the product, ...: of what is the same for all rows it may be of rows, too."""
    (value, *_) = inputs
    axes = tuple(equation.params["axes"])
    linear = equation.name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
    if value.place is None or value.place == LIFTED or value.place.axis not in axes:
        place = value.place
        if place is not None and place != LIFTED:
            place = places.reduced(place, axes)
        degree_one = linear and place is not None and len({term.factor for term in value.terms}) == 1
        terms = (
            power_of(value, Fraction(1), equation.source, equation.number)
            if degree_one
            else function([value], equation.source, equation.number)
        )
        return [walk.made(equation, inputs, settled(terms), place, n) for n in range(len(equation.outputs))]
    if linear and not any(term.own for term in value.terms):
        return [walk.made(equation, inputs, value.terms, None)]
    symbol = Symbol(equation.number, "mixed", value.free, equation.outputs[0] == (), equation.source, equation.number)
    found = walk.made(equation, inputs, frozenset([Term(False, frozenset([(symbol, Fraction(1))]))]), None)
    asks = value.free and equation.name == "reduce_or" and equation.outputs[0] == ()
    return [found.but(guard=walk.number("sum", walk.whole_of.get(value.number, value.number)) if asks else None)]


def _along(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """Along an axis: cumulative sums, sorting."""
    axis = equation.params.get("axis", equation.params.get("dimension"))
    place = common_place(inputs)
    if place is not None and place.axis == axis:
        raise MixesRows(equation.name)
    inputs = [lifted(value, place, equation.source) for value in inputs]
    terms = (
        settled(inputs[0].terms) if equation.name == "cumsum" else function(inputs, equation.source, equation.number)
    )
    return [walk.made(equation, inputs, terms, place, n) for n in range(len(equation.outputs))]


def _reversed(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    (value,) = inputs
    if value.place is not None and value.place.axis in equation.params["dimensions"]:
        raise MixesRows("rev")
    found = walk.made(equation, inputs, value.terms, value.place)
    walk.whole_of[found.number] = walk.whole_of.get(value.number, value.number)
    return [found]


def _trailing(count: int) -> Rule:
    """Operations on the last axes, for each entry of those before."""

    def rule(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
        place = common_place(inputs)
        found: list[Value] = []
        if place is not None and place != LIFTED and place.axis >= len(equation.shapes[0]) - count:
            raise MixesRows(equation.name)
        inputs = [lifted(value, place, equation.source) for value in inputs]
        terms = function(inputs, equation.source, equation.number)
        for n in range(len(equation.outputs)):
            found.append(walk.made(equation, inputs, terms, place, n))
        return found

    return rule


def _multiplied(where: Callable[[Place | None, Place | None, Equation], tuple[Place | None, bool]]) -> Rule:
    """Sums of products: `where` says where their rows are, and whether they are summed over them."""

    def rule(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
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
        found = walk.made(equation, inputs, summed(terms) if over_rows else settled(terms), place)
        return [_as_sum(found, equation) if over_rows else found]

    return rule


def _contracted(left: Place | None, right: Place | None, equation: Equation) -> tuple[Place | None, bool]:
    ranks = len(equation.shapes[0]), len(equation.shapes[1])
    return places.contracted(left, right, equation.params["dimension_numbers"], ranks)


def _convolved(left: Place | None, right: Place | None, equation: Equation) -> tuple[Place | None, bool]:
    first, second = (
        (params["feature_group_count"], params["batch_group_count"])
        for params in (equation.params, equation.other_params)
    )
    return places.convolved(left, right, equation.params, equation.shapes, first != second)


def _windows(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """Pooling."""
    value = inputs[0]
    place = value.place
    if place is not None and place != LIFTED:
        sizes, strides = equation.params["window_dimensions"], equation.params["window_strides"]
        if (sizes[place.axis], strides[place.axis]) != (1, 1):
            raise MixesRows(equation.name)
    linear = equation.name == "reduce_window_sum"
    terms = settled(value.terms) if linear else function([value], equation.source, equation.number)
    return [walk.made(equation, inputs, terms, place, n) for n in range(len(equation.outputs))]


def _gathered(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    operand, indices = inputs

    def counts_rows(component: int) -> bool:
        if indices.parts is not None and component < len(indices.parts):
            return indices.parts[component].position
        return indices.position

    place: Place | None = None
    if LIFTED in (operand.place, indices.place):
        place = common_place([value.but(terms=frozenset([Term(True)])) for value in inputs])
    elif operand.place is not None or indices.place is not None:
        rank = len(equation.outputs[0])
        place = places.gathered(operand.place, indices.place, equation.params, equation.shapes[0], rank, counts_rows)
    operand = lifted(operand, place, equation.source)
    own = indices.place is not None
    terms = frozenset(Term(term.own or own, term.factor) for term in operand.terms)
    kinds = {symbol.kind for term in indices.terms for symbol, _ in term.factor}
    odd = kinds - {"position"} or (kinds and inputs[0].place is None)
    if odd or (indices.place is None and any(term.own for term in indices.terms)):
        terms = function([operand, lifted(indices, place, equation.source)], equation.source, equation.number)
    return [walk.made(equation, inputs, terms, place)]


def _scattered(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """Sums into an array that has no rows (counts, histograms), and what is put at the same place of all rows."""
    operand, indices, updates = inputs
    if indices.is_shared and indices.place is None:
        return _put(walk, equation, operand, updates)
    if operand.place is not None or equation.name not in ("scatter-add", "scatter_add"):
        raise CannotTell(equation.name)
    plain = all(term.factor == frozenset() for term in indices.terms)
    if indices.place is None or updates.place is None or not plain or operand.terms - CONSTANT:
        raise CannotTell(equation.name)
    own = frozenset(Term(True, term.factor) for term in updates.terms)
    found = walk.made(equation, inputs, operand.terms | own, None)
    return [_as_sum(found, equation)]


def _put(walk: Walk, equation: Equation, operand: Known, updates: Known) -> list[Value]:
    numbers = equation.params["dimension_numbers"]
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(equation.shapes[0])) if axis not in taken]
    places_of_updates = dict(zip(numbers.update_window_dims, kept))
    found = updates.place
    if found is not None and found != LIFTED:
        if found.axis not in places_of_updates:
            raise MixesRows(equation.name)
        found = found._replace(axis=places_of_updates[found.axis])
    if operand.place not in (None, LIFTED) and operand.place.axis not in kept:
        raise MixesRows(equation.name)
    inputs = [operand, updates.but(place=found)]
    place = common_place(inputs)
    if equation.name not in ("scatter", "scatter-add", "scatter-mul"):
        raise CannotTell(equation.name)
    if place is not None and place != LIFTED:
        part = next(axis for axis, where in places_of_updates.items() if where == place.axis)
        if equation.shapes[2][part] != equation.shapes[0][place.axis]:
            raise MixesRows(equation.name)
    inputs = [lifted(value, place, equation.source) for value in inputs]
    terms = union(inputs)
    if equation.name == "scatter-mul":
        terms = inputs[0].terms | product(inputs[0], inputs[1], equation.source)
    return [walk.made(equation, inputs, terms, place)]


def _sliced_at(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """`dynamic_slice`."""
    value, *starts = inputs
    place = value.place
    if any(not start.is_shared or start.place is not None for start in starts):
        raise CannotTell(equation.name)
    rows = place if place != LIFTED else None
    if rows is not None and equation.params["slice_sizes"][rows.axis] != equation.shapes[0][rows.axis]:
        raise MixesRows(equation.name)
    return [walk.made(equation, inputs, value.terms, place)]


def _updated_at(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """`dynamic_update_slice`."""
    value, update, *starts = inputs
    place = common_place([value, update])
    if any(not start.is_shared or start.place is not None for start in starts):
        raise CannotTell(equation.name)
    if place is not None and place != LIFTED and equation.shapes[0][place.axis] != equation.shapes[1][place.axis]:
        raise MixesRows(equation.name)
    inputs = [lifted(each, place, equation.source) for each in (value, update)]
    return [walk.made(equation, inputs, union(inputs), place)]


def _reshaped(place: Place, equation: Equation, rows: int) -> Place:
    shape, order = equation.shapes[0], equation.params["dimensions"]
    if order is not None:  # it transposes first, as `vmap` has it of convolutions
        place, shape = places.transposed(place, order), tuple(shape[axis] for axis in order)
    return places.reshaped(place, shape, equation.outputs[0], rows)


def _squeezed(place: Place, equation: Equation, rows: int) -> Place:
    found = places.reduced(place, tuple(equation.params["dimensions"]))
    assert found is not None
    return found


def _sliced(place: Place, equation: Equation, rows: int) -> Place:
    params = equation.params
    length = equation.shapes[0][place.axis]
    return places.sliced(place, params["start_indices"], params["limit_indices"], params["strides"], length, rows)


def _summed_over_named(walk: Walk, equation: Equation, inputs: list[Known]) -> list[Value]:
    """`psum`: of a `vmap`'s axis, a sum over it; of a mesh's, the same for all of its micro-batches."""
    axes = equation.params["axes"]
    if not any(isinstance(axis, int) for axis in axes):
        return [value.but() for value in inputs]
    if len(inputs) > 1 or not all(isinstance(axis, int) for axis in axes):
        raise CannotTell(equation.name)
    return _summed(walk, equation, inputs)


STRUCTURE_RULES: dict[str, Rule] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), _summed_over_named),
    "reshape": _moved(_reshaped),
    "transpose": _moved(lambda p, e, n: places.transposed(p, e.params["permutation"])),
    "squeeze": _moved(_squeezed),
    "expand_dims": _moved(lambda p, e, n: places.reshaped(p, e.shapes[0], e.outputs[0], n)),
    "slice": _moved(_sliced),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "stack": _stacked,
    "pad": _padded,
    "reduce_sum": _summed,
    **{name: _reduced for name in (
        "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin", "reduce_xor",
    )},
    **{name: _along for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort")},
    "rev": _reversed,
    "dot_general": _multiplied(_contracted),
    "conv_general_dilated": _multiplied(_convolved),
    **{name: _windows for name in (
        "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
    )},
    "gather": _gathered,
    "scatter-add": _scattered,
    "scatter": _scattered,
    "scatter-mul": _scattered,
    "dynamic_slice": _sliced_at,
    "dynamic_update_slice": _updated_at,
    **{name: _trailing(1) for name in ("top_k", "approx_top_k")},
    **{name: _trailing(2) for name in (
        "cholesky", "eigh", "eig", "lu", "qr", "svd", "triangular_solve", "geqrf", "householder_product", "schur",
        "tridiagonal_solve",
    )},
    "fft": lambda w, e, i: _trailing(len(e.params["fft_lengths"]))(w, e, i),
}  # fmt: skip
