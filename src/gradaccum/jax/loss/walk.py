"""Follows rows through the traces of a loss, equation by equation; what each primitive does is in `rules`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from gradaccum.jax.loss import algebra
from gradaccum.jax.loss.algebra import ONE, SHARED, Flaw, Lost, Place, Source, Term, Terms, Value, mixes, unknown

_SHAPES = {
    "axis_size", "batch_group_count", "feature_group_count", "inline", "length", "lhs_shape", "name", "new_sizes",
    "out_sharding", "reps", "rhs_shape", "shape", "sharding", "size", "sizes",
}  # fmt: skip
"""Parameters that go with the rows where shapes do, which is looked at; the length of a scan is by its rule."""
_EXTENTS = {"limit_indices", "padding_config", "slice_sizes", "start_indices"}
"""Of all axes but that of the rows, they are the same."""
_PICKS = {"dynamic_slice", "gather", "slice", "split"}
_INTEGRAL = {
    *_PICKS, "abs", "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum",
    "dot_general", "expand_dims", "max", "min", "mul", "neg", "pad", "psum", "reduce_max", "reduce_min", "reduce_sum",
    "reshape", "rev", "scatter-add", "select_n", "sort", "square", "squeeze", "stop_gradient", "sub", "transpose",
}  # fmt: skip
"""Of whole numbers they give whole numbers."""
_POSITIVE = _INTEGRAL - {"convert_element_type", "neg", "pad", "sub"} | {"div", "integer_pow", "pow", "rsqrt", "sqrt"}
"""Of positive numbers they give positive ones."""
LAYOUT = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
_PERMUTES = {"expand_dims", "reshape", "rev", "squeeze", "transpose"}
"""They have the same entries, in other places."""
_SAME_TOTAL = _PERMUTES | {"reduce_sum"}
_OF_ENTRIES = {
    "abs", "and", "convert_element_type", "div", "eq", "ge", "gt", "integer_pow", "is_finite", "le", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "select_n", "sign", "square", "sub", "add",
}  # fmt: skip
"""What a loss and its `weight` count entries with, which may have changed their places before."""
_STEPS = {"argmax", "argmin", "ceil", "convert_element_type", "floor", "round", "sign"}
"""Of a statistic of the batch they may be the same for all micro-batches, as comparisons may."""
_BOUNDS = {"abs", "clamp", "max", "min"}
_GUARDS = {"add", "add_any", "clamp", "max", "min", "select_n", "sub"}
"""What keeps a sum from being 0 as a denominator."""
Rule = Callable[["Equation", list[Value]], Any]
"""From what is known of an operation's inputs to what is known of its output, or of all of its outputs in a list."""


class Equation:
    """One operation, for each number of rows."""

    def __init__(self, walk: Walk, traced: Sequence[Any], values: list[Value]) -> None:
        self.walk, self.traced, self.values, self.name = walk, traced, values, traced[-1].primitive.name
        self.params = traced[-1].params
        self.ins = [[np.shape(v.aval) for v in each.invars] for each in traced]
        self.outs = [[np.shape(v.aval) for v in each.outvars] for each in traced]
        self.shapes, self.outputs = self.ins[-1], self.outs[-1]
        self.dtypes = [getattr(v.aval, "dtype", None) for v in traced[-1].outvars]
        self.info = _called_from(traced[-1].source_info, walk.callers)

    @functools.cached_property
    def number(self) -> int:
        params = tuple((key, repr(value)) for key, value in sorted(self.params.items()) if key != "sharding")
        if self.name in _PERMUTES:
            params = (*params, ("of", repr(self.shapes)))
        return self.walk.number(self.name, params, *(value.number for value in self.values))

    @functools.cached_property
    def source(self) -> Source:
        return Source(self.name, self.info, self.number)

    def check_parameters(self) -> None:
        """Numbers that it is given beside its inputs, powers say, are the same for any number of rows."""
        first = self.values[0] if self.values else Value()
        for name in sorted(self.params.keys() - _SHAPES):
            found = [_plain(each.params.get(name)) for each in self.traced]
            if name in _EXTENTS and isinstance(found[0], tuple):
                found = [
                    [n for axis, n in enumerate(each) if axis != first.axis and first.lanes is None] for each in found
                ]
            for value, rows in zip(found, self.walk.rows):
                if repr(value) != repr(found[-1]):  # NaN is not itself
                    raise unknown(f"{name}={value} for {rows} rows, {name}={found[-1]} for {self.walk.rows[-1]}")

    def each(self, name: str) -> list[Any]:
        """A parameter, for each number of rows."""
        return [each.params[name] for each in self.traced]

    def grown(self, n: int = 0) -> Place | None:
        """Where an output has its rows by its shapes: the axis that differs."""
        return self.walk.place_of([shapes[n] for shapes in self.outs])

    def grown_axes(self, inputs: bool = False) -> int:
        """The most axes of an output, or input, whose length goes with the rows."""
        shapes = zip(*(self.ins if inputs else self.outs))
        return max((sum(len(set(lengths)) > 1 for lengths in zip(*each)) for each in shapes), default=0)

    def placed(self, place: Place | None, n: int = 0) -> Place | None:
        """Where an output has the rows that an input has at `place`: in the axis whose length goes with them."""
        found = self.grown(n) if place is not None else None
        return found and place._replace(axis=found.axis)  # type: ignore[union-attr]  # there is a place

    def lifted(self, value: Value, place: Place | None) -> Value:
        if place is None or value.place is not None or value.flaw is not None:
            return value
        terms = frozenset([Term(False, self.walk.factor(value))]) if value.own else value.terms
        return value.but(terms=terms, place=place)

    def product(self, values: Sequence[Value]) -> Terms:
        a, b = values
        if a.place is None and b.place is None and a.own and b.own:
            a, b = (a, b) if b.free and b.scalar else (b, a)
            b = b.but(terms=frozenset([Term(False, self.walk.factor(b))]))
        return algebra.limited(Term(x.own or y.own, algebra.times(x.scale, y.scale)) for x in a.terms for y in b.terms)

    def quotient(self, values: Sequence[Value]) -> Terms:
        return self.product([values[0], values[1].but(terms=self.power(values[1], -1))])

    def power(self, value: Value, degree: int) -> Terms:
        """A power, which of a number with rows must be of a single term."""
        if value.place is None and (value.own or len(value.terms) > 1):
            return frozenset([Term(False, algebra.power(self.walk.factor(value), degree))])
        if len({term.scale for term in value.terms}) != 1:
            return self.function([value])
        return frozenset([Term(value.own, algebra.power(next(iter(value.terms)).scale, degree))])

    def function(self, values: Sequence[Value]) -> Terms:
        """Of any function, entry by entry: one of plain rows, or of what is the same for any rows."""
        sums = [value for value in values if value.own] if all(value.place is None for value in values) else []
        scales = {term.scale for value in values for term in value.terms} - {ONE}
        if not sums and all(map(algebra.is_one, scales)):
            return frozenset([Term(any(value.own for value in values), functools.reduce(algebra.times, scales, ONE))])
        if sums or not all(map(algebra.is_by_rows, scales)):
            sums += [value for value in values if any(term.scale for term in value.terms)]
            is_choice = all(value.place is not None for value in sums) and all(map(algebra.is_choice, scales))
            source = min(map(self.walk.first_sum, sums), key=lambda source: source.number)
            raise mixes(algebra.FREE if is_choice else "", source)
        raise Lost("count")

    def made(self, inputs: Sequence[Value], terms: Terms, place: Place | None, n: int = 0) -> Value:
        """An output that follows from these inputs."""
        flaw, roots = self.absorbed(inputs), algebra.roots_of(inputs)
        integral = is_integral(self.dtypes[n])
        return Value(
            frozenset() if flaw else terms,
            None if flaw else place,
            flaw,
            self.number if n == 0 else self.walk.number("output", n, self.number),
            # No gradient goes through whole numbers.
            roots & ~(algebra.DIFFERENTIATED | algebra.FLOWING) if integral else roots,
            scalar=math.prod(self.outputs[n]) == (self.outputs[n][place.axis] if place and not flaw else 1),
            integral=integral or (self.name in _INTEGRAL and all(value.integral for value in inputs)),
            positive=self.name in ("exp", "exp2", "logistic")
            or (self.name in _POSITIVE and all(value.positive or (value.known or 0) > 0 for value in inputs)),
        )

    def valued(self, lanes: Any, terms: Terms | None = None) -> Value:
        """An output that is this number in each imagined batch; of these terms, if its operation says so."""
        lanes = tuple(lanes) if isinstance(lanes, list) else (lanes,) * algebra.SAMPLES * len(self.walk.rows)
        sums = [value for value in self.values if value.lanes is not None and value.known is None]
        if len(sums) == 1 and self.name in _GUARDS:
            lanes, terms = self._guarded(sums[0], lanes, terms)
        return self.walk.valued(lanes, self.number, terms).but(place=self.grown(), roots=algebra.roots_of(self.values))

    def _guarded(self, value: Value, lanes: Any, terms: Terms | None) -> tuple[Any, Terms | None]:
        """A sum that a constant has changed: the same sum, but for rounding, and perhaps where it is 0; with a doubt,
        if it hardly changes where it is large."""
        was = value.lanes or ()
        if value.integral and self.name in ("max", "clamp") and lanes == tuple(max(x, 1) for x in was):
            lanes = tuple(x or 1 for x in was)  # a sum of whole numbers is 0, or at least 1
        off = _changes(was, lanes)
        rounding = _rounding(str(self.dtypes[0]), 0.25 in was)
        if max(off) <= rounding:
            lanes = tuple(x if x or abs(y) <= rounding else y for x, y in zip(was, lanes))
            return lanes, value.terms if lanes == was else terms
        if max((change for change, x in zip(off, was) if abs(x) >= 1000), default=1.0) < 1e-2:
            worst = off.index(max(off))
            change = f"({was[worst]:g} becomes {lanes[worst]:.14g}), and each micro-batch changes its own"
            self.walk.doubts.append(f"`{self.name}` at {line(self.info)} changes a sum over the batch {change}.")
            return was, value.terms
        return lanes, terms

    # Flaws.

    def lost(self, error: Lost, n: int = 0) -> Value:
        """An output that terms can't express."""
        kind, soft = error.kind, error.soft
        if soft == algebra.PAIRS and not any(value.own for value in self.values):
            kind = "position"
        bounds = _BOUNDS if any(not value.free for value in self.values) else set()
        if kind == "mixed" and self._asks(_STEPS | bounds):
            soft = soft or algebra.FREE
        number = self.number if n == 0 else self.walk.number("output", n, self.number)
        source = error.source or self.source._replace(number=number)
        flaw = self.absorbed(self.values) or Flaw(kind, source, soft, error.why)
        return Value(frozenset(), None, flaw, number, algebra.roots_of(self.values), scalar=self.outputs[n] == ())

    def absorbed(self, values: Sequence[Value]) -> Flaw | None:
        """The flaw of what follows from these: the gravest that they have, if it can't be taken back here."""
        if not (flaws := _flaws_of(values)):
            return None
        shifted = [flaw for flaw in flaws if flaw.soft == algebra.FREE]
        if self.name in ("add", "add_any", "sub") and shifted and len({flaw.source for flaw in flaws}) == 1:
            return shifted[0]  # rows that were shifted by the largest of them, where nothing but this joins them
        order = ("random", "mixed", "position", "count", "unknown")
        flaw = min(flaws, key=lambda flaw: (not flaw.certain, order.index(flaw.kind), flaw.source.number))
        if flaw.source.info is None:  # of a constant: it shows where it is used
            flaw = flaw._replace(source=self.source._replace(number=flaw.source.number))
        if flaw.kind == "mixed" and self._asks(_STEPS):
            return flaw._replace(soft=algebra.FREE)
        if flaw.kind == "position" and self.grown_axes() > 1:
            return flaw._replace(soft=algebra.PAIRS)
        meets = len({value.flaw and value.flaw.source for value in values if value.depends}) > 1
        return flaw._replace(soft=self._settled({each.soft for each in flaws}, meets)) if flaw.soft else flaw

    def _settled(self, softs: set[str], meets: bool) -> str:
        """How the output's flaw may be taken back, where those of the inputs may, which meet other rows or don't."""
        fewer = self.grown_axes(inputs=True) > self.grown_axes()
        if algebra.FREE in softs:
            return algebra.FREE
        if algebra.PAIRS in softs:
            picked = fewer and self.name in _PICKS
            masked = meets and not fewer and self.name in ("mul", "select_n")
            return algebra.FREE if picked or masked else "" if fewer else algebra.PAIRS
        joined = meets and self.name not in ("concatenate", "gather", "sort")
        return algebra.FREE if fewer else "" if joined else algebra.MOVED

    def _asks(self, names: Collection[str]) -> bool:
        """Whether it gives a number for all rows that may be the same for all micro-batches, whatever is mixed."""
        return (str(self.dtypes[0]) == "bool" or self.name in names) and self.grown_axes() == 0


def _changes(was: Sequence[float], lanes: Sequence[float]) -> list[float]:
    """By how much numbers have changed, relative to what they were; 0 where they were 0, or are no numbers."""
    return [abs(y / x - 1) if x and y == y else 0.0 for x, y in zip(was, lanes)]


def _plain(value: Any) -> Any:
    """A parameter that is made of numbers and words, or None."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool | int | float | str) else None


class Walk:
    """The traces of a loss for several numbers of rows, side by side; `rules` by primitive, and of all others at ""."""

    def __init__(self, rows: tuple[int, ...], rules: dict[str, Rule]) -> None:
        self.rows, self.rules, self.batches = rows, rules, algebra.Batches(rows)
        self.keys: list[tuple[Any, ...]] = []  # by number: a primitive, its parameters, the numbers of its inputs
        self.values: dict[int, Value] = {}
        self.positions: set[int] = set()  # of what is 0, 1, 2, ... along the rows
        self.sources: dict[algebra.Symbol, Source] = {}  # of sums over the rows
        self.bound: set[algebra.Symbol] = set()  # those that follow from what is differentiated
        self.flowing: set[algebra.Symbol] = set()  # those that a gradient flows through
        self.has_branches = False  # whether there is a choice by a sum over the batch that may be either
        self.doubts: list[str] = []  # what was taken for true
        self.callers: list[tuple[str, Any]] = []  # functions that are being walked through, and who has called them
        self.split: frozenset[str] = frozenset()  # axes of devices that the rows are split over, inside a `shard_map`
        self._numbers: dict[Any, int] = {}

    def number(self, name: str, detail: Any, *inputs: int) -> int:
        """One number for all that is computed alike."""
        key = name, detail, *inputs
        if key not in self._numbers:
            self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return self._numbers[key]

    def through(self, number: int, names: Collection[str]) -> int:
        """What this was before these primitives."""
        while self.keys[number][0] in names:
            number = self.keys[number][2]
        return number

    def total(self, value: Value) -> int:
        """The number of the sum of all entries: equal for an array, its transpose, its sums over some axes; and for
        what is computed of entries before or after they change their places."""
        return self.number("sum", None, self._in_place(self.through(value.number, _SAME_TOTAL))[0])

    def _in_place(self, number: int) -> tuple[int, tuple[Any, ...]]:
        """What this is before its entries change their places, and how they do."""
        name, params, *inputs = self.keys[number]
        if name in _PERMUTES:
            inner, moves = self._in_place(inputs[0])
            return inner, (*moves, (name, params))
        if name not in _OF_ENTRIES:
            return number, ()
        inner_numbers, all_moves = list(inputs), set()
        for position, each in enumerate(inputs):
            value = self.values[each]
            if not value.scalar or value.place is not None:
                inner_numbers[position], moves = self._in_place(each)
                all_moves.add(moves)
        if len(all_moves) != 1:
            return number, ()
        return self.number(name, params, *inner_numbers), all_moves.pop()

    def is_position(self, number: int) -> bool:
        """Whether it is 0, 1, 2, ... along the rows."""
        return self.through(number, LAYOUT) in self.positions

    def ancestors(self, number: int) -> set[int]:
        """All that this follows from."""
        found: set[int] = set()
        left = [number]
        while left:
            if (each := left.pop()) not in found:
                found.add(each)
                left += self.keys[each][2:]
        return found

    def first_sum(self, value: Value) -> Source:
        """The first sum over the rows that this follows from."""
        sums = [self.sources[each] for each in self.ancestors(value.number) if each in self.sources]
        return min(sums, key=lambda source: source.number, default=Source("sum"))

    def factor(self, value: Value) -> algebra.Scale:
        """A number without rows as a factor of others: what is the same for any rows, or one sum over the batch."""
        if value.lanes is not None:
            return algebra.scaled(value.lanes)
        if not value.own:
            scales = {term.scale for term in value.terms} or {ONE}
            if len(scales) > 1:
                raise Lost("count")
            return scales.pop()
        if len(value.terms) > 1 or not value.scalar:
            raise mixes(source=self.first_sum(value))
        symbol = self.number("local", None, value.number) if value.roots & algebra.LOCAL else value.number
        self.bound |= set() if value.free else {symbol}
        self.flowing |= {symbol} if value.roots & algebra.FLOWING else set()
        self.sources.setdefault(symbol, self.first_sum(value))
        return algebra.times(next(iter(value.terms)).scale, algebra.scaled(self.batches.sum_at(symbol, value)))

    def summed(self, e: Equation, inputs: Sequence[Value], terms: Terms, over_rows: bool) -> Value:
        """A sum over the rows, or of sums over them; a part of it where devices have parts of the rows."""
        if over_rows:
            counts = self.batches.count
            terms = frozenset(term if term.own else Term(False, algebra.times(term.scale, counts)) for term in terms)
        found = e.made(inputs, terms, None)
        if e.name == "reduce_sum" and found.scalar:
            found = found.but(number=self.total(inputs[0]))
        return self.added_up(e, found, over_rows) if over_rows or found.own else found

    def added_up(self, e: Equation, found: Value, over_rows: bool = True) -> Value:
        self.sources.setdefault(found.number, e.source._replace(number=found.number))
        if self.split and over_rows:
            return found.but(roots=found.roots | algebra.LOCAL)
        return found if found.roots & algebra.LOCAL else self.as_sum(found)

    def as_sum(self, value: Value) -> Value:
        """A sum over the batch alone, of which functions are computed in imagined batches."""
        is_sum = value.scalar and value.free and value.terms == {Term(True)}
        return value.but(lanes=self.batches.sum_at(value.number, value)) if is_sum else value

    def run(self, jaxprs: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        """What is known of the outputs of a jaxpr, closed or not, of which there is one for each number of rows."""
        opened = [(each.jaxpr, each.consts) if hasattr(each, "consts") else (each, []) for each in jaxprs]
        if len({tuple(equation.primitive.name for equation in jaxpr.eqns) for jaxpr, _ in opened}) > 1:
            raise unknown("other operations")
        last, _ = opened[-1]
        known: dict[Any, Value] = dict(zip(last.invars, inputs, strict=True))
        known.update(zip(last.constvars, map(self._constant, zip(*(consts for _, consts in opened)))))
        given = [[*jaxpr.constvars, *jaxpr.invars] for jaxpr, _ in opened]
        same: set[tuple[Any, ...]] = {*zip(*given)}  # what is the same thing in each trace

        def read(variables: tuple[Any, ...]) -> Value:
            if all(isinstance(each, Literal) for each in variables):
                return self._constant([v.val for v in variables])
            if variables not in same:
                raise unknown("other inputs")
            return known[variables[-1]]

        for equations in zip(*(jaxpr.eqns for jaxpr, _ in opened)):
            values = [read(variables) for variables in zip(*(each.invars for each in equations))]
            self.values.update((value.number, value) for value in values)
            known.update(zip(equations[-1].outvars, self._outputs(equations, values), strict=True))
            same.update(zip(*(each.outvars for each in equations)))
        return [read(variables) for variables in zip(*(jaxpr.outvars for jaxpr, _ in opened))]

    def _outputs(self, equations: Sequence[Any], values: list[Value]) -> list[Value]:
        equation = Equation(self, equations, values)
        try:
            if not any(value.flaw for value in values):
                equation.check_parameters()
            found = (self.rules.get(equation.name) or self.rules[""])(equation, values)
            return [self._checked(equation, *pair) for pair in enumerate(found if isinstance(found, list) else [found])]
        except Lost as error:
            return [equation.lost(error, n) for n in range(len(equation.outputs))]

    def _checked(self, equation: Equation, n: int, value: Value) -> Value:
        """An output, which grows with the rows where they are said to be, and nowhere else."""
        shapes = [shapes[n] for shapes in equation.outs]
        grown = {axis for axis, lengths in enumerate(zip(*shapes)) if len(set(lengths)) > 1}
        if value.flaw is None and grown != ({value.place.axis} if value.place is not None else set()):
            raise unknown(f"shape {shapes[0]} for {self.rows[0]} rows, {shapes[-1]} for {self.rows[-1]}")
        return value

    def _constant(self, given: Sequence[Any]) -> Value:
        """What is known of an array that was written down."""
        last, shapes = given[-1], [np.shape(each) for each in given]
        is_traced, number = isinstance(last, jax.core.Tracer), self.number("constant", id(last))
        found = Value(SHARED, self.place_of(shapes), None, number, integral=is_integral(getattr(last, "dtype", None)))
        if not is_traced and is_number(last):
            found = found.but(positive=bool((np.asarray(last) > 0).all()))
        if is_traced or not is_number(last) or (np.size(last) != 1 and all(each is last for each in given)):
            return found
        if all(map(_is_one_number, given)):
            return self._known(given).but(place=found.place)
        same = len(set(shapes)) == 1
        if same and all(np.array_equal(each, last) for each in given):
            return found
        if len(shapes[-1]) == 1 and all(np.array_equal(each, np.arange(len(each))) for each in given):
            self.positions.add(number)
        flaw = Flaw("count" if same else "position", Source("constant", number=number))
        return found.but(terms=frozenset(), place=None, flaw=flaw)

    def _known(self, given: Sequence[Any]) -> Value:
        """A number that each trace knows: a power of the number of rows, if it is nearly one."""
        numbers = [np.ravel(each)[0].item() for each in given]
        if len({*numbers}) > 1 and all(numbers) and (degree := algebra.exponent(numbers, self.rows)) is not None:
            exact = [numbers[-1] * (rows / self.rows[-1]) ** degree for rows in self.rows]
            off = max(abs(x / y - 1) for x, y in zip(numbers, exact))
            if off > _rounding(str(getattr(given[-1], "dtype", type(given[-1]).__name__))):
                what = "A number that is written down goes with the number of rows"
                self.doubts.append(f"{what}, but for {off:.1g} of it.")
            numbers = exact
        lanes = tuple(algebra.NONE if x != x else x for x in numbers for _ in range(algebra.SAMPLES))
        return self.valued(lanes, self.number("value", tuple(map(repr, lanes))))

    def valued(self, lanes: tuple[Any, ...], number: int, terms: Terms | None = None) -> Value:
        """What is known of a number that is known in each imagined batch."""
        integral = all(not isinstance(each, float) or each.is_integer() for each in lanes)
        found = Value(SHARED, None, None, number, 0, True, integral, lanes=lanes)
        if (known := found.known) is not None:
            number = self.number("value", repr(known))
            return found.but(number=number, terms=SHARED if known else frozenset())
        constant = len({x for x in lanes if x == x}) == 1  # but where it is 0 / 0
        return found.but(terms=frozenset([Term(False, algebra.scaled(lanes))]) if terms is None or constant else terms)

    def place_of(self, shapes: Sequence[Sequence[int]]) -> Place | None:
        """Where an array has its rows by its shapes: the axis that differs."""
        axes = [axis for axis, lengths in enumerate(zip(*shapes)) if len(set(lengths)) > 1]
        if len(axes) > 1:
            raise mixes(algebra.PAIRS)
        if not axes:
            return None
        lengths = [shape[axes[0]] for shape in shapes]
        each = lengths[-1] // self.rows[-1]
        if lengths != [rows * each for rows in self.rows]:
            raise unknown("an axis that is no multiple of the rows")
        return Place(axes[0], 1, each)


def joined(walk: Walk, a: Value, b: Value) -> Value:
    """What is known of a number that is one of both."""
    if a == b:
        return a
    number = a.number if a.number == b.number else walk.number("either", None, a.number, b.number)
    flaws = [value.flaw for value in (a, b) if value.flaw is not None]
    if len({value.place for value in (a, b) if value.place is not None and value.own}) > 1:
        flaws = flaws or [Flaw("mixed", Source("cond", number=number), algebra.FREE)]
    flaw = min(flaws, key=lambda flaw: not flaw.certain, default=None)
    terms, place = (frozenset(), None) if flaw else (a.terms | b.terms, algebra.common_place([a, b]))
    return Value(terms, place, flaw, number, a.roots | b.roots, a.scalar and b.scalar, a.integral and b.integral)


def is_number(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf" or str(np.asarray(value).dtype) == "bfloat16"
    except TypeError:  # keys
        return False


def is_integral(dtype: Any) -> bool:
    return str(dtype).startswith(("bool", "int", "uint"))


def _rounding(kind: str, is_small: bool = False) -> float:
    return 4.1e-12 if kind == "float64" else 4.1e-8 if is_small else 1.1e-6


# Where in the user's code.

_OWN = tuple(os.path.dirname(path) + os.sep for path in (jax.__file__, os.path.dirname(__file__)))
_PACKAGES = f"{os.sep}site-packages{os.sep}"


def is_ours(path: str) -> bool:
    """Whether this is a module of JAX, or of this package."""
    return path.startswith(_OWN)


def _frames(info: Any) -> list[Any]:
    """The calls that led to an operation, the innermost first, without JAX' own."""
    frames = getattr(getattr(info, "traceback", None), "frames", None) or []
    return [frame for frame in frames if not is_ours(frame.file_name)]


def _flaws_of(values: Sequence[Value]) -> list[Flaw]:
    flaws = [value.flaw for value in values if value.flaw is not None]
    if any(flaw.soft == algebra.PAIRS for flaw in flaws):  # a pattern of rows by rows may mask positions
        return [flaw for flaw in flaws if flaw.kind != "position"] or flaws
    return flaws


def _is_one_number(array: Any) -> bool:
    """Whether all of its entries are the same."""
    return np.size(array) == 1 or bool((np.asarray(array) == np.ravel(array)[:1]).all())


def _called_from(info: Any, callers: list[tuple[str, Any]]) -> Any:
    """Who has asked for an operation inside of functions that JAX may have traced for somebody else before."""
    for name, caller in reversed(callers):
        frames = _frames(info)
        if not name or (frames and frames[0].function_name.rpartition(".")[2] == name):
            break
        info = caller
    return info


def line(info: Any) -> str:
    """ "train.py:12", or "normalization.py:40, from train.py:12" for what a package does; "" where it is unknown."""
    frames = _frames(info)
    if not frames:
        return ""
    inner = frames[0]
    mine = next((frame for frame in frames if _PACKAGES not in frame.file_name), inner)
    text = f"{os.path.basename(inner.file_name)}:{inner.line_num}"
    return text if mine is inner else f"{text}, from {os.path.basename(mine.file_name)}:{mine.line_num}"
