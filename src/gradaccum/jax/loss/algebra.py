"""What is known of an array while a loss is followed: where its rows are, and how its numbers follow from them.

The idea stands on top of `judge`. Sums join terms, products multiply their factors, powers raise them, and any other
function of a symbol is a new one, "mixed".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = [
    "COUNT", "FINITE", "LIFTED", "NAN", "ONE", "POSITIVE", "ROWS", "SHARED", "CannotTell", "Factor", "Known", "Lost",
    "MixesRows", "Place", "Source", "Symbol", "Term", "Terms", "Value", "as_factor", "common_place",
    "elsewhere", "exponent", "function", "lifted", "of", "power", "power_of", "product", "shift_of", "summed",
    "symbols_of", "times", "union",
]  # fmt: skip

Factor = frozenset[tuple["Symbol", Fraction]]
"""Powers of symbols; the empty one is 1."""
ONE: Factor = frozenset()
FINITE, NAN = "finite", "NaN"
"""What `Value.guard` asks where it looks for NaN: whether it is none, and whether it is."""
_MOST = 12
"""Terms that a number may have."""
POSITIVE = {"abs", "exp", "exp2", "logistic", "sqrt", "square"}


class Source(NamedTuple):
    """The operation that computed a number, and JAX' `source_info` of it."""

    primitive: str
    info: Any = None


class Symbol(NamedTuple):
    """A number that takes all rows to know and stands as a factor; equal if number and kind are.

    Its kind is "count" for a function of the number of rows, "sum" for a sum over rows, "position" for a row's place in
    the batch, "random" for what is drawn for rows from a key that all micro-batches share, and "mixed" for any other
    function of several rows. `free`: it follows from the batch alone, not from what is differentiated. `scalar`: it is
    one number for all entries; others are other numbers once entries have moved. `positive`: not below 0. `origin`:
    the number of the first sum over rows that it comes from.
    """

    number: Any
    kind: str
    free: bool = True
    scalar: bool = True
    source: Any = None
    origin: Any = None
    positive: bool = False

    def __hash__(self) -> int:
        return hash((self.number, self.kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and (self.number, self.kind) == (other.number, other.kind)


class Term(NamedTuple):
    """A part of a number."""

    own: bool
    factor: Factor = ONE


Terms = frozenset[Term]
"""The parts that a number is the sum of; none for 0."""
COUNT = Symbol("rows", "count", positive=True)
ROWS: Factor = frozenset([(COUNT, Fraction(1))])
"""The number of rows."""
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
    """A number takes several rows to know, in a way that terms can't express; `how` as of `Lost`."""

    def __init__(self, how: str = "mixed") -> None:
        super().__init__(how)
        self.how = how


class CannotTell(Exception):
    """An operation that the judgement knows nothing about."""


class Lost(NamedTuple):
    """A number that terms can't express, and what is still known of it.

    `how`: "unknown" (nothing); else it takes several rows to know: "order" (the rows in another order), "some" (some
    of the rows), "pairs" (an entry for each pair of rows), "mixed" (anything else), or "unsure" (in a way that may be
    none, such as a diagonal of pairs). `certain`: a function that isn't linear has mixed rows, so nothing cancels any
    more. `early` counts the operations before it.
    """

    how: str
    source: Source
    message: str = ""
    origin: Any = None
    early: int = 0
    certain: bool = False


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of an array."""

    terms: Terms
    place: Place | None = None  # where its rows are; None without such an axis
    number: Any = None  # equal for arrays that are computed alike
    whole: Any = None  # equal for arrays with one sum of entries: an array, its transpose, its sums over some axes
    core: Any = None  # of a sum over rows, its number, which multiples by known numbers keep
    sums: frozenset[tuple[Any, Source]] = frozenset()  # the sums over rows in it: (number, source)
    scalar: bool = False  # all entries (of a row) are one number
    values: tuple[Any, Any] | None = None  # that number at both counts of rows, where it is known
    integral: bool = False  # its entries are whole numbers
    positive: bool = False  # none of them is below 0
    position: bool = False  # it counts the rows: 0, 1, 2, ...
    parts: tuple[Value, ...] | None = None  # concatenated along the last axis, if these have one entry each
    guard: Any = None  # what it asks: the number of a sum, whether anything is in it; or `FINITE`, `NAN`
    free: bool = True  # it does not follow from what is differentiated
    fresh: bool = False  # it follows from what is another one for each micro-batch: its key, or its state
    state: frozenset[int] = frozenset()  # the inputs that are state and that it is computed from
    unsure: bool = False  # what mixes rows in it may cancel out, or be the same for all micro-batches
    doubts: frozenset[str] = frozenset()  # what was taken for true of it, and need not be: messages
    local: bool = False  # it is one device's part of a sum over the rows of several

    @property
    def own(self) -> bool:
        """Whether it has a part that follows from rows."""
        return any(term.own for term in self.terms)

    @property
    def is_shared(self) -> bool:
        """Whether it is the same for any rows."""
        return self.terms <= SHARED and self.place is None

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


Known = Value | Lost


def of(symbol: Symbol, own: bool = False) -> Terms:
    """A number that is this symbol, times each row's own number perhaps."""
    return frozenset([Term(own, frozenset([(symbol, Fraction(1))]))])


def symbols_of(*values: Value) -> list[Symbol]:
    """All symbols in the terms of these."""
    return [symbol for value in values for term in value.terms for symbol, _ in term.factor]


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
    origin, source = min(value.sums, key=lambda each: each[0], default=(number, source))
    number = ("local", number) if value.local else number
    symbol = Symbol(number, kind, value.free, value.scalar, source, origin, value.positive)
    return times(own, frozenset([(symbol, Fraction(1))]))


def _as_sum(term: Term) -> Term:
    """A number without rows that is one sum over rows times what is known: `sqrt(s) ** 2` is that sum again."""
    sums = [each for each in term.factor if each[0].kind == "sum" and each[1] == 1 and each[0].scalar]
    return term if term.own or len(sums) != 1 else Term(True, term.factor - {*sums})


def lifted(value: Value, place: Place | None, source: Source) -> Value:
    """A number as all rows of an array have it."""
    if place is None or value.place is not None:
        return value
    return value.but(
        terms=frozenset([Term(False, as_factor(value, source))]) if value.own else value.terms, place=place
    )


def common_place(values: Sequence[Value]) -> Place | None:
    """Where arrays of one shape have their rows."""
    places = {value.place for value in values if value.place is not None and value.own}
    places = places or {value.place for value in values if value.place is not None}
    if len(places) > 1:
        raise MixesRows("pairs")
    return next(iter(places), None)


def union(values: Sequence[Value]) -> Terms:
    """Of sums of numbers, and of what is linear in all of them."""
    return _limited(term for value in values for term in value.terms)


def product(a: Value, b: Value, source: Source) -> Terms:
    """Of two numbers, entry by entry."""
    alone = a.place is None and b.place is None
    if alone and a.own and b.own and a.terms and b.terms:
        if not (b.free and b.scalar) and a.free and a.scalar:
            a, b = b, a
        b = b.but(terms=frozenset([Term(False, as_factor(b, source))]))
    found = (Term(x.own or y.own, times(x.factor, y.factor)) for x in a.terms for y in b.terms)
    return _limited(_as_sum(term) if alone and not (a.own or b.own) else term for term in found)


def power_of(value: Value, degree: Fraction, source: Source, number: Any) -> Terms:
    """A power of a number, or what goes by a power of its size: of a factor that may be below 0, neither."""
    factors = {term.factor for term in value.terms}
    if not factors or (value.place is not None and len(factors) > 1):
        return function([value], source, number)
    is_sum = value.place is None and (len(factors) > 1 or value.own)
    factor = as_factor(value, source) if is_sum else factors.pop()
    unsigned = degree.denominator % 2 == 0 or source.primitive not in ("div", "integer_pow", "pow", "square")
    if unsigned and any(not s.positive and (degree == 1 or d % 2 == 0) for s, d in factor):
        return function([value], source, number)
    found = Term(value.own and not is_sum, power(factor, degree))
    return frozenset([_as_sum(found) if value.place is None else found])


def function(values: Sequence[Value], source: Source, number: Any) -> Terms:
    """Of any other function, entry by entry."""
    own, with_rows = any(value.own for value in values), any(value.place is not None for value in values)
    symbols = symbols_of(*values)
    if not symbols and (with_rows or not own):
        return frozenset([Term(own)])
    kinds = {"mixed" if symbol.kind == "sum" else symbol.kind for symbol in symbols}
    kinds |= {"mixed"} if own and not with_rows else set()
    kind = next(kind for kind in ("random", "mixed", "position", "count") if kind in kinds)
    causes = [(s.origin, s.source) for s in symbols if s.kind in (kind, "sum") and s.origin is not None]
    causes += [each for value in values for each in value.sums if kind == "mixed"]
    positive = source.primitive in POSITIVE
    origin, source = min(causes, key=lambda cause: cause[0], default=(number, source))
    free, scalar = (
        all(value.free for value in values),
        all(value.scalar for value in values) and not (own and with_rows),
    )
    return of(Symbol(number, kind, free, scalar, source, origin, positive), own and with_rows)


def shift_of(value: Value) -> Terms | None:
    """The parts of a number that all rows share and that take all of them to know, if the others are plain."""
    shift = frozenset(term for term in value.terms if not term.own and term.factor)
    plain = all(symbol.scalar for term in shift for symbol, _ in term.factor)
    return shift if shift and plain and all(term in shift or not term.factor for term in value.terms) else None


def elsewhere(terms: Terms, number: Any) -> Terms:
    """After entries have moved or were added up: what differs between them is another number."""

    def moved(symbol: Symbol) -> Symbol:
        return symbol if symbol.scalar else symbol._replace(number=(symbol.number, number))

    return frozenset(Term(term.own, frozenset((moved(s), d) for s, d in term.factor)) for term in terms)


def summed(terms: Terms) -> Terms:
    """After a sum over the rows."""
    return frozenset(term if term.own else Term(False, times(term.factor, ROWS)) for term in terms)
