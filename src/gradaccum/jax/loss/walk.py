"""Follows the rows through two traces of a loss: what is known of its arrays, their algebra, and the walk.

The idea stands on top of `judge`, what each primitive does in `rules`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

Factor = frozenset[tuple["Symbol", Fraction]]
"""Powers of symbols; the empty one is 1."""
ONE: Factor = frozenset()
_MOST = 12
"""Terms that a number may have."""
_KINDS = ["random", "mixed", "sum", "unknown", "position", "count"]
"""Of symbols, that of a function of several of them first."""
_POSITIVE = {"abs", "exp", "exp2", "logistic", "sqrt", "square"}


class Tag:
    """What an array inherits from those that it follows from; and, at last, what `Value.guard` asks."""

    DIFFERENTIATED, FRESH = "differentiated", "fresh"
    """It follows from what is differentiated; from what is another one for each micro-batch: its key, its state."""
    LOCAL = "local"
    """It is one device's part of a sum over the rows of several."""
    PAIRS, SOME = "pairs", "some"
    """It has an entry for each pair of rows; it is made of some of the rows."""
    UNSURE, LINEAR, ORDER, PATTERN = "unsure", "linear", "order", "pattern"
    """Rows are mixed in it: which may cancel out, or be one for all; linearly so far, which may be taken back; as rows
    in another order; as a pattern of rows by rows, such as an identity matrix."""
    MAY_CANCEL = frozenset([UNSURE, LINEAR, ORDER, PATTERN])
    FINITE, NAN = "finite", "NaN"
    """Whether it is no NaN; whether it is one."""


class Source(NamedTuple):
    """The operation that computed a number, JAX' `source_info`, the number of its output, and why it is unknown."""

    primitive: str
    info: Any = None
    number: Any = None
    why: str = ""


class Symbol(NamedTuple):
    """A number that takes all rows to know and stands as a factor; equal if number and kind are.

    `free`: it follows from the batch alone, not from what is differentiated. `scalar`: it is one number for all
    entries; others are other numbers once entries have moved. `positive`: not below 0.
    """

    number: Any
    kind: str
    source: Source
    free: bool = True
    scalar: bool = True
    positive: bool = False

    def __hash__(self) -> int:
        return hash(self[:2])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and self[:2] == other[:2]


class Term(NamedTuple):
    """A part of a number."""

    own: bool
    factor: Factor = ONE


Terms = frozenset[Term]
"""The parts that a number is the sum of; none for 0."""
COUNT = Symbol("rows", "count", Source("rows"), positive=True)
ROWS: Factor = frozenset([(COUNT, Fraction(1))])
SHARED: Terms = frozenset([Term(False)])
"""The same for any rows."""


class Place(NamedTuple):
    """Where an array has its rows: in an axis of `outer * rows * inner` entries."""

    axis: int
    outer: int = 1
    inner: int = 1


LIFTED = Place(-1)
"""One row of an array, in the body of a loop over rows."""


class MixesRows(Exception):
    """An operation takes several rows to know, in a way that terms can't express: its output is a symbol, "mixed".

    Its argument is a tag that says what may still take the mixing back; none, if nothing can.
    """


class CannotTell(Exception):
    """An operation that the judgement knows nothing about."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of an array."""

    terms: Terms = frozenset()
    place: Place | None = None  # where its rows are; None without such an axis
    number: Any = None  # equal for arrays that are computed alike
    whole: Any = None  # equal for arrays with one sum of entries: an array, its transpose, its sums over some axes
    core: Any = None  # of a sum over rows, its number, which multiples by known numbers keep
    sums: frozenset[Source] = frozenset()  # the sums over rows that it follows from
    tags: frozenset[str] = frozenset()  # of what it follows from; the names of state; what was taken for true of it
    scalar: bool = False  # all entries (of a row) are one number
    values: tuple[Any, Any] | None = None  # that number at both counts of rows, where it is known
    integral: bool = False  # its entries are whole numbers
    positive: bool = False  # none of them is below 0
    position: bool = False  # it counts the rows: 0, 1, 2, ...
    parts: tuple[Value, ...] | None = None  # concatenated along the last axis, if these have one entry each
    guard: Any = None  # what it asks: the number of a sum, whether anything is in it; or `FINITE`, `NAN`

    @property
    def own(self) -> bool:
        """Whether it has a part that follows from rows."""
        return any(term.own for term in self.terms)

    @property
    def axis(self) -> int:
        """The axis of its rows; -1 without one."""
        return -1 if self.place is None else self.place.axis

    @property
    def is_shared(self) -> bool:
        """Whether it is the same for any rows."""
        return self.terms <= SHARED and self.place is None

    @property
    def symbols(self) -> list[Symbol]:
        """All symbols in its terms."""
        return [symbol for term in self.terms for symbol, _ in term.factor]

    @property
    def is_lost(self) -> bool:
        """Whether rows are mixed in it, or it is unknown."""
        return any(symbol.kind in ("mixed", "unknown") for symbol in self.symbols)

    @property
    def unknown(self) -> Source | None:
        """The operation that is not followed, if one is in it."""
        return next((symbol.source for symbol in self.symbols if symbol.kind == "unknown"), None)

    @property
    def free(self) -> bool:
        """Whether it does not follow from what is differentiated."""
        return Tag.DIFFERENTIATED not in self.tags

    @property
    def total(self) -> Any:
        """The number of the sum of all its entries."""
        return self.number if self.whole is None else self.whole

    def divides(self, number: Any) -> bool:
        """Whether it is this sum, or each part of it is divided by it: nothing where nothing is in the sum."""
        return self.core == number or all(any(s.number == number and d < 0 for s, d in t.factor) for t in self.terms)

    def but(self, **changes: Any) -> Value:
        """The same, but for something."""
        return dataclasses.replace(self, **changes)

    def tagged(self, *tags: str) -> Value:
        """The same with these tags, too."""
        return self.but(tags=self.tags.union(tags))


# The algebra: what becomes of terms.


def of(symbol: Symbol, own: bool = False) -> Terms:
    """A number that is this symbol, times each row's own number perhaps."""
    return frozenset([Term(own, frozenset([(symbol, Fraction(1))]))])


def times(a: Factor, b: Factor) -> Factor:
    """The product of two factors."""
    powers = dict(a)
    for symbol, degree in b:
        powers[symbol] = powers.get(symbol, Fraction(0)) + degree
    return frozenset((symbol, degree) for symbol, degree in powers.items() if degree)


def power(factor: Factor, degree: Fraction | int) -> Factor:
    """A power of a factor."""
    return frozenset((symbol, each * degree) for symbol, each in factor)


def exponent(first: float, second: float, ratio: float) -> Fraction | None:
    """The d of `second = first * ratio ** d`, if it is a half or whole number up to 2."""
    if first == second:
        return Fraction(0)
    for halves in (2, -2, 4, -4, 1, -1, 3, -3):
        if first and abs(second / first / ratio ** (halves / 2) - 1) < 1e-5:
            return Fraction(halves, 2)
    return None


def _limited(terms: Iterable[Term]) -> Terms:
    found = frozenset(terms)
    if len(found) > _MOST:
        raise CannotTell("too many denominators")
    return found


def as_factor(value: Value, source: Source) -> Factor:
    """A number without rows as a factor of others; a sum over rows is a symbol."""
    factors = {term.factor for term in value.terms} or {ONE}
    if len(factors) == 1 and not value.own:
        return factors.pop()
    kind, own = ("sum", factors.pop()) if len(value.terms) == 1 else ("mixed", ONE)
    number = value.number if value.core is None else value.core
    symbols = value.symbols if kind == "mixed" else []
    source = _first_cause(symbols, [value], kind, source._replace(number=number))
    number = (Tag.LOCAL, number) if Tag.LOCAL in value.tags else number
    return times(
        own, frozenset([(Symbol(number, kind, source, value.free, value.scalar, value.positive), Fraction(1))])
    )


def _as_sum(term: Term) -> Term:
    """A number without rows that is one sum over rows times what is known: `sqrt(s) ** 2` is that sum again."""
    sums = [each for each in term.factor if each[0].kind == "sum" and each[1] == 1 and each[0].scalar]
    return term if term.own or len(sums) != 1 else Term(True, term.factor - {*sums})


def lifted(value: Value, place: Place | None, source: Source) -> Value:
    """A number as all rows of an array have it."""
    if place is None or value.place is not None:
        return value
    terms = frozenset([Term(False, as_factor(value, source))]) if value.own else value.terms
    return value.but(terms=terms, place=place)


def common_place(values: Sequence[Value]) -> Place | None:
    """Where arrays of one shape have their rows."""
    places = {value.place for value in values if value.place is not None and value.own}
    places = places or {value.place for value in values if value.place is not None}
    if len(places) > 1:
        raise MixesRows(Tag.PAIRS)
    return next(iter(places), None)


def union(values: Iterable[Value]) -> Terms:
    """Of sums of numbers, and of what is linear in all of them."""
    return _limited(term for value in values for term in value.terms)


def product(a: Value, b: Value, source: Source) -> Terms:
    """Of two numbers, entry by entry."""
    alone = a.place is None and b.place is None
    if alone and a.own and b.own:
        if not (b.free and b.scalar) and a.free and a.scalar:
            a, b = b, a
        b = b.but(terms=frozenset([Term(False, as_factor(b, source))]))
    found = (Term(x.own or y.own, times(x.factor, y.factor)) for x in a.terms for y in b.terms)
    return _limited(_as_sum(term) if alone and not (a.own or b.own) else term for term in found)


def power_of(value: Value, degree: Fraction, source: Source) -> Terms:
    """A power of a number, or what goes by a power of its size: of a factor that may be below 0, neither."""
    factors = {term.factor for term in value.terms}
    if not factors or (value.place is not None and len(factors) > 1):
        return function([value], source)
    is_sum = value.place is None and (len(factors) > 1 or value.own)
    factor = as_factor(value, source) if is_sum else factors.pop()
    unsigned = degree.denominator % 2 == 0 or source.primitive not in ("div", "integer_pow", "pow", "square")
    if unsigned and any(not s.positive and (degree == 1 or d % 2 == 0) for s, d in factor):
        return function([value], source)
    found = Term(value.own and not is_sum, power(factor, degree))
    return frozenset([_as_sum(found) if value.place is None else found])


def function(values: Sequence[Value], source: Source) -> Terms:
    """Of any other function, entry by entry."""
    own, with_rows = any(value.own for value in values), any(value.place is not None for value in values)
    symbols = [symbol for value in values for symbol in value.symbols]
    if not symbols and (with_rows or not own):
        return frozenset([Term(own)])
    kinds = [symbol.kind for symbol in symbols] + ["sum"] * (own and not with_rows)
    kind = min(kinds, key=_KINDS.index)
    cause = _first_cause(symbols, values, kind, source)
    free, alone = all(value.free for value in values), all(value.scalar for value in values)
    scalar = alone and not (own and with_rows)
    kind = "mixed" if kind == "sum" else kind
    return of(Symbol(source.number, kind, cause, free, scalar, source.primitive in _POSITIVE), own and with_rows)


def _first_cause(symbols: Sequence[Symbol], values: Sequence[Value], kind: str, source: Source) -> Source:
    causes = [s.source for s in symbols if s.kind in (kind, "sum") and s.source.number is not None]
    if kind in ("mixed", "sum"):
        causes += [each for value in values for each in value.sums]
    return min(causes, key=lambda each: each.number, default=source)


def elsewhere(terms: Terms, number: Any) -> Terms:
    """After entries have moved or were added up: what differs between them is another number."""

    def moved(symbol: Symbol) -> Symbol:
        return symbol if symbol.scalar else symbol._replace(number=(symbol.number, number))

    return frozenset(Term(term.own, frozenset((moved(s), d) for s, d in term.factor)) for term in terms)


def summed(terms: Terms) -> Terms:
    """After a sum over the rows."""
    return frozenset(term if term.own else Term(False, times(term.factor, ROWS)) for term in terms)


# The walk.

_SHAPES = {
    "axis_size", "batch_group_count", "feature_group_count", "inline", "k", "length", "name", "out_sharding",
    "sharding", "size",
}  # fmt: skip
"""Parameters that go with the rows where shapes do, which is looked at; the length of a scan is by its rule."""
_EXTENTS = {"limit_indices", "padding_config", "slice_sizes", "start_indices"}
"""Of all axes but that of the rows, they are the same."""
_PICKS = {"dynamic_slice", "gather", "slice", "split"}
_LINEAR = {
    *_PICKS, "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum",
    "expand_dims", "neg", "pad", "psum", "reduce_sum", "reshape", "rev", "squeeze", "stop_gradient", "sub", "transpose",
}  # fmt: skip
_BILINEAR = {"conv_general_dilated", "div", "dot_general", "mul"}
"""Linear where all others are the same for any rows."""
_INTEGRAL = {
    *_LINEAR, "abs", "dot_general", "max", "min", "mul", "reduce_max", "reduce_min", "scatter-add", "select_n", "sort",
    "square",
}  # fmt: skip
"""Of whole numbers they give whole numbers; and, but for differences, of positive numbers positive ones."""
_SAME_TOTAL = {"expand_dims", "reduce_sum", "reshape", "rev", "squeeze", "transpose"}
_STEPS = {"argmax", "argmin", "ceil", "convert_element_type", "floor", "round", "sign"}
"""Of a statistic of the batch, they may be the same for all micro-batches, as questions may."""
_LATE = 1 << 40
Rule = Callable[["Equation", list[Value]], Any]
"""From what is known of an operation's inputs to what is known of its output, or of all of its outputs in a list."""


class Equation:
    """One operation, at both numbers of rows."""

    def __init__(self, walk: Walk, one: Any, other: Any, values: list[Value]) -> None:
        self.walk, self.name, self.traced, self._values = walk, one.primitive.name, (one, other), values
        self.params, self.other_params = one.params, other.params
        self.shapes, self.outputs, self.other_outputs = (
            [tuple(np.shape(variable.aval)) for variable in some] for some in (one.invars, one.outvars, other.outvars)
        )
        self.dtypes = [[getattr(v.aval, "dtype", None) for v in some] for some in (one.invars, one.outvars)]
        self.info = _called_from(one.source_info, walk.callers)

    @functools.cached_property
    def number(self) -> int:
        """Equal for operations that compute the same."""
        static = tuple(sorted((key, repr(value)) for key, value in self.params.items() if key != "sharding"))
        return self.walk.number(self.name, static, *(value.number for value in self._values))

    @functools.cached_property
    def source(self) -> Source:
        """The operation, as the cause of what it gives."""
        return Source(self.name, self.info, self.number)

    def check_parameters(self, first: Value | None) -> None:
        """Numbers that it is given beside its inputs, powers say, are the same for both numbers of rows."""
        rows = None if first is None or first.place is None else first.place.axis
        for name, value in self.params.items():
            other: Any = self.other_params.get(name)
            if name in _EXTENTS and isinstance(value, tuple):
                if first is not None and first.values is not None:
                    continue
                value, other = ([each for axis, each in enumerate(some) if axis != rows] for some in (value, other))
            elif name in _SHAPES or not isinstance(value, bool | int | float | str):
                continue
            if repr(value) != repr(other):  # NaN is not itself
                one, two = self.walk.rows
                raise CannotTell(f"{name}={value} for {one} rows, {name}={other} for {two}")

    def grown(self, n: int = 0) -> Place | None:
        """Where an output has its rows by its shapes: the axis that differs."""
        return self.walk.place_by_shapes(self.outputs[n], self.other_outputs[n])

    def checked(self, n: int, value: Value) -> Value:
        """An output, which grows with the rows where they are said to be, and nowhere else, if rows are kept apart."""
        first, second = self.outputs[n], self.other_outputs[n]
        grown = {axis for axis, (a, b) in enumerate(zip(first, second)) if a != b}
        place = value.place
        if grown == ({place.axis} if place is not None and place != LIFTED else set()):
            return value
        if not value.is_lost:
            raise CannotTell(f"shape {first} for {self.walk.rows[0]} rows, {second} for {self.walk.rows[1]}")
        return value.but(place=None)

    def lost(self, kind: str, values: list[Value], tag: str = "", why: str = "") -> Value:
        """An output that terms can't express: a symbol, whose cause is what has mixed rows first."""
        source = Source(self.name, self.info, self.walk.number("lost", len(self.walk._numbers)), why)
        if any(value.is_lost for value in values) and not why:
            return Value(function(values, source), None, source.number, **followed(values))
        own = [term for value in values for term in value.terms if term.own]
        if tag and all(any(symbol.kind == "position" for symbol, _ in term.factor) for term in own):
            tag, source = Tag.PATTERN, source._replace(number=source.number + _LATE)
        tags = {tag} | ({Tag.LINEAR} if tag == Tag.PAIRS and self.name in _LINEAR else set())
        return Value(
            of(Symbol(source.number, kind, source, scalar=False)), None, source.number, **followed(values)
        ).tagged(*tags)

    def settled(self, values: list[Value], value: Value) -> Value:
        """An output, with what may still take back that rows are mixed in it."""
        mixed, tags, name = [each for each in values if each.is_lost], {*value.tags}, self.name
        meets = sum(each.own or each.is_lost for each in values) > 1
        nonlinear = name not in _LINEAR and (name not in _BILINEAR or meets)
        fewer = _growing(self.traced, "invars") > _growing(self.traced, "outvars")
        # Sums over rows in another order are what they were; rows that meet others, or some of them, are not.
        if Tag.ORDER in tags and (name not in ("concatenate", "gather", "sort") if meets else fewer):
            tags = tags - {Tag.ORDER} | {Tag.LINEAR}
            nonlinear = nonlinear or (not meets and name in _PICKS)
        if sum(Tag.SOME in each.tags for each in values) > 1:  # what is missing in one may be in the other
            tags = tags - {Tag.SOME} | {Tag.ORDER if name == "concatenate" else Tag.LINEAR}
        tags -= {Tag.LINEAR} if nonlinear else set()
        return value.but(tags=self._pairs_settled(mixed, tags, fewer))

    def _pairs_settled(self, mixed: list[Value], tags: set[str], fewer: bool) -> frozenset[str]:
        """Of pairs, the diagonal may be picked, or masked and summed."""
        if Tag.PAIRS in tags and (fewer or any(not each.tags & {Tag.PAIRS, Tag.PATTERN} for each in mixed)):
            tags = tags - {Tag.PAIRS} | ({Tag.UNSURE} if fewer and self.name in _PICKS else set())
        if Tag.PATTERN in tags and any(Tag.PATTERN not in each.tags for each in mixed):
            tags = tags - {Tag.PATTERN} | ({Tag.LINEAR} if self.name in ("mul", "select_n") else set())
        return frozenset(tags)

    def known(self, first: Any, second: Any) -> Value:
        """An output whose entries are one number that is known at both numbers of rows."""
        return self.walk.of_values(first, second).but(place=self.grown())

    def placed(self, place: Place | None, n: int = 0) -> Place | None:
        """Where an output has the rows that an input has at `place`: in the axis whose length goes with them."""
        if place is None or place == LIFTED:
            return place
        found = self.grown(n)
        return None if found is None else place._replace(axis=found.axis)

    def aligned(self, inputs: Sequence[Value]) -> tuple[Place | None, list[Value]]:
        """Where arrays of one shape have their rows, and all of them as these rows have them."""
        place = common_place(inputs)
        return place, [lifted(value, place, self.source) for value in inputs]

    def made(self, inputs: Sequence[Value], terms: Terms, place: Place | None, n: int = 0, moves: bool = True) -> Value:
        """What is known of an output that follows from these inputs; `moves`: not entry by entry."""
        rows = self.outputs[n][place.axis] if place is not None and place != LIFTED else 1
        name, dtype = self.name, str(self.dtypes[1][n])
        found = Value(
            elsewhere(terms, self.number) if moves else terms,
            place,
            self.number if n == 0 else self.walk.number("output", self.number, n),
            whole=inputs[0].total if name in _SAME_TOTAL else None,
            scalar=math.prod(self.outputs[n]) == rows,
            integral=is_integral(dtype) or (name in _INTEGRAL and all(value.integral for value in inputs)),
            positive=dtype.startswith(("bool", "uint")) or self._keeps_sign(inputs),
            **followed(inputs),
        )
        # No gradient goes through whole numbers. A question about the batch may have one answer in all micro-batches.
        if is_integral(dtype):
            found = found.but(tags=found.tags - {Tag.DIFFERENTIATED})
        asks = (dtype == "bool" or name in _STEPS) and place is None and self.outputs[n] == self.other_outputs[n]
        return found.tagged(Tag.UNSURE) if asks and any(s.kind == "mixed" for s in found.symbols) else found

    def _keeps_sign(self, inputs: Sequence[Value]) -> bool:
        if self.name in _POSITIVE or (self.name == "integer_pow" and self.params["y"] % 2 == 0):
            return True
        return self.name in _INTEGRAL - {"neg", "sub"} | {"div"} and all(value.positive for value in inputs)


def followed(values: Sequence[Value]) -> dict[str, Any]:
    """What a number inherits from those that it follows from."""
    return {name: frozenset().union(*(getattr(v, name) for v in values)) for name in ("sums", "tags")}


class Walk:
    """Two traces of a loss, side by side; `rules` of primitives by name, and of all others at ""."""

    def __init__(self, rows: tuple[int, int], rules: dict[str, Rule]) -> None:
        self.rows, self.rules = rows, rules
        self._numbers: dict[Any, int] = {}
        self.callers: list[tuple[str, Any]] = []
        """The functions that are being walked through: their names, and who has called them."""
        self.is_derivative = False
        """Whether it is a derivative that is walked through."""
        self.split: frozenset[str] = frozenset()
        """The axes of devices that the rows are split over, inside a `shard_map`."""

    def number(self, *key: Any) -> int:
        """One number for all that is computed alike."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, first: Any, second: Any, inputs: Sequence[Value]) -> list[Value]:
        """What is known of the outputs of a jaxpr, closed or not."""
        (first, consts), (second, others) = opened(first), opened(second)
        if [e.primitive.name for e in first.eqns] != [e.primitive.name for e in second.eqns]:
            raise CannotTell("other operations")
        known: dict[Any, Value] = dict(zip(first.invars, inputs, strict=True))
        known.update((v, self._constant(a, b)) for v, a, b in zip(first.constvars, consts, others, strict=True))

        def read(one: Any, other: Any) -> Value:
            return self._constant(one.val, other.val) if isinstance(one, Literal) else known[one]

        for one, other in zip(first.eqns, second.eqns):
            values = [read(*pair) for pair in zip(one.invars, other.invars, strict=True)]
            known.update(zip(one.outvars, self._outputs(one, other, values), strict=True))
        return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]

    def _constant(self, first: Any, second: Any) -> Value:
        """What is known of an array that was written down."""
        number, is_traced = self.number("constant", id(first)), isinstance(first, jax.core.Tracer)
        if np.shape(first) != np.shape(second):
            same = not is_traced and np.size(first) and bool((np.asarray(first) == np.ravel(first)[0]).all())
            terms = SHARED if same else of(Symbol(number, "position", Source("constant"), scalar=False), True)
            return Value(terms, self.place_by_shapes(np.shape(first), np.shape(second)), number)
        if is_traced or np.size(first) != 1 or not is_number(first):
            integral = is_integral(getattr(first, "dtype", None))
            return Value(SHARED, None, number, scalar=np.size(first) == 1, integral=integral)
        return self.of_values(np.asarray(first).item(), np.asarray(second).item())

    def of_values(self, first: Any, second: Any) -> Value:
        """What is known of a number that is known at both numbers of rows."""
        number = self.number("value", repr(first), repr(second))
        degree = exponent(first, second, self.rows[1] / self.rows[0]) if first == first else Fraction(0)
        terms: Terms = frozenset()
        if degree is None:
            terms = of(Symbol(number, "count", Source("constant")))
        elif not first == 0 == second:
            terms = frozenset([Term(False, power(ROWS, degree) if degree else ONE)])
        integral = all(not isinstance(value, float) or value.is_integer() for value in (first, second))
        positive = min(first, second) >= 0
        return Value(terms, None, number, scalar=True, values=(first, second), integral=integral, positive=positive)

    def place_by_shapes(self, first: Sequence[int], second: Sequence[int]) -> Place | None:
        """Where an array has its rows by its shapes: the axis that differs."""
        axes = [axis for axis, (a, b) in enumerate(zip(first, second)) if a != b]
        if not axes:
            return None
        if len(axes) > 1:
            raise MixesRows(Tag.PAIRS)
        length = first[axes[0]]
        if length % self.rows[0] or length // self.rows[0] * self.rows[1] != second[axes[0]]:
            raise CannotTell("an axis that is no multiple of the rows")
        return Place(axes[0], 1, length // self.rows[0])

    def _outputs(self, one: Any, other: Any, values: list[Value]) -> list[Value]:
        equation = Equation(self, one, other, values)
        try:
            if not any(value.is_lost for value in values):
                equation.check_parameters(values[0] if values else None)
            found = (self.rules.get(equation.name) or self.rules[""])(equation, values)
            found = [equation.checked(*pair) for pair in enumerate(found if isinstance(found, list) else [found])]
        except MixesRows as error:
            found = [equation.lost("mixed", values, str(error)) for _ in one.outvars]
        except CannotTell as error:
            found = [equation.lost("unknown", values, why=str(error)) for _ in one.outvars]
        return [equation.settled(values, value) if value.is_lost else value for value in found]


def _growing(traced: tuple[Any, Any], side: str) -> int:
    """The most axes of an input or output whose length goes with the rows."""
    pairs = zip(*(getattr(each, side) for each in traced))
    return max((sum(x != y for x, y in zip(np.shape(a.aval), np.shape(b.aval))) for a, b in pairs), default=0)


def joined(walk: Walk, a: Value, b: Value) -> Value:
    """What is known of a number that is one of both."""
    if a == b:
        return a
    try:
        place = common_place([a, b])
    except MixesRows:
        raise MixesRows(Tag.UNSURE) from None
    both: dict[str, Any] = {
        name: getattr(a, name) if getattr(a, name) == getattr(b, name) else None for name in ("values", "guard")
    }
    both |= {name: getattr(a, name) and getattr(b, name) for name in ("scalar", "position", "integral", "positive")}
    number = a.number if a.number == b.number else walk.number("either", a.number, b.number)
    return Value(a.terms | b.terms, place, number, **both, **followed([a, b]))


def opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, [])


def is_number(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf" or str(np.asarray(value).dtype) == "bfloat16"
    except TypeError:
        return False


def is_integral(dtype: Any) -> bool:
    """Whether numbers of this dtype are whole."""
    return str(dtype).startswith(("bool", "int", "uint"))


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
