"""What becomes of terms: sums, products, powers, other functions, and reductions over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from gradaccum.jax.loss.values import (
    COUNT,
    FINITE,
    ONE,
    Factor,
    Known,
    MixesRows,
    Place,
    Source,
    Symbol,
    Term,
    Terms,
    limited,
    power,
    times,
)  # fmt: skip

__all__ = [
    "as_factor",
    "chosen",
    "common_place",
    "function",
    "lifted",
    "power_of",
    "product",
    "quotient",
    "settled",
    "summed",
    "union",
]


def as_factor(value: Known, source: Source) -> Factor:
    """A number without rows as a factor of others; a sum over rows is a symbol."""
    factor = value.factor
    if factor is not None or not value.terms:
        return factor or ONE
    kind = "sum" if len(value.terms) == 1 else "mixed"
    own = next(iter(value.terms)).factor if kind == "sum" else ONE
    number, source = value.core or (value.number, source)
    origin, source = min(value.sums, key=lambda each: each[0], default=(number, source))
    symbol = Symbol(number, kind, value.free, value.scalar, source, origin)
    return times(own, frozenset([(symbol, Fraction(1))]))


def lifted(value: Known, place: Place | None, source: Source) -> Known:
    """A number as all rows of an array have it."""
    if place is None or value.place is not None:
        return value
    if not any(term.own for term in value.terms):
        return value.but(place=place)
    return value.but(terms=frozenset([Term(False, as_factor(value, source))]), place=place)


def common_place(values: Sequence[Known]) -> Place | None:
    """Where arrays of one shape have their rows.

    Raises:
        MixesRows: They have them in different axes: each row meets all others.
    """
    places = {value.place for value in values if value.place is not None and any(term.own for term in value.terms)}
    places = places or {value.place for value in values if value.place is not None}
    if len(places) > 1:
        raise MixesRows("rows in different axes")
    return next(iter(places), None)


def _one(terms: Terms) -> Term | None:
    """The terms as one, if they have the same factor."""
    factors = {term.factor for term in terms}
    if len(factors) != 1:
        return None
    return Term(any(term.own for term in terms), factors.pop())


def union(values: Sequence[Known]) -> Terms:
    """Of sums of numbers, and of what is linear in all of them."""
    return limited(frozenset(term for value in values for term in value.terms))


def product(a: Known, b: Known, source: Source) -> Terms:
    """Of two numbers, entry by entry."""
    if not a.terms or not b.terms:
        return frozenset()
    if a.place is None and any(term.own for term in a.terms) and any(term.own for term in b.terms):
        if not (b.free and b.scalar) and a.free and a.scalar:
            a, b = b, a
        b = b.but(terms=frozenset([Term(False, as_factor(b, source))]))
    return limited({Term(x.own or y.own, times(x.factor, y.factor)) for x in a.terms for y in b.terms})


def quotient(a: Known, b: Known, source: Source, number: Any) -> Terms:
    """Of two numbers, entry by entry."""
    return product(a, b.but(terms=power_of(b, Fraction(-1), source, number)), source)


def power_of(value: Known, degree: Fraction, source: Source, number: Any) -> Terms:
    """A power of a number, or what goes by a power of it."""
    one = _one(value.terms)
    if one is None or (value.place is None and one.own):
        if value.place is not None or not value.terms:
            return function([value], source, number)
        return frozenset([Term(False, power(as_factor(value, source), degree))])
    return frozenset([Term(one.own, power(one.factor, degree))])


def function(values: Sequence[Known], source: Source, number: Any) -> Terms:
    """Of any other function, entry by entry."""
    own = any(term.own for value in values for term in value.terms)
    with_rows = any(value.place is not None for value in values)
    factors = {term.factor for value in values for term in value.terms}
    if factors <= {ONE} and (with_rows or not own):
        return frozenset([Term(own)])
    symbols = [symbol for factor in factors for symbol, _ in factor]
    kinds = {symbol.kind for symbol in symbols}
    if own and not with_rows:
        kinds.add("mixed")
    kind = next(kind for kind in ("random", "mixed", "sum", "position", "count") if kind in kinds)
    kind = "mixed" if kind == "sum" else kind
    causes = [(s.origin, s.source) for s in symbols if s.kind in (kind, "sum") and s.origin is not None]
    causes += [each for value in values for each in value.sums if kind == "mixed"]
    origin, source = min(causes, key=lambda cause: cause[0], default=(number, source))
    free = all(value.free for value in values)
    symbol = Symbol(number, kind, free, all(value.scalar for value in values), source, origin)
    return frozenset([Term(own and with_rows, frozenset([(symbol, Fraction(1))]))])


def chosen(which: Known, cases: Sequence[Known], source: Source, number: Any) -> Terms:
    """Of `select_n`: one of several numbers, entry by entry."""
    if which.guard:
        kept = [case for case in cases if case.values is None]
        if kept and (which.guard == FINITE or all(case.divides(which.guard) for case in kept)):
            return union(kept)
    if which.terms and _one(which.terms) not in (Term(False), Term(True)):
        return function([which, *cases], source, number)
    own = any(term.own for term in which.terms)
    if own and which.place is None:
        return function([which, *cases], source, number)
    return frozenset(Term(term.own or own, term.factor) for term in union(cases))


def settled(terms: Terms) -> Terms:
    """After a sum over entries: what was multiplied entry by entry is no factor any more."""

    def of_entries(symbol: Symbol) -> Symbol:
        kind = symbol.kind if symbol.kind in ("random", "position") else "mixed"
        return symbol._replace(number=("settled", symbol.number), kind=kind, scalar=True)

    def one(factor: Factor) -> Factor:
        return frozenset((s if s.scalar else of_entries(s), degree) for s, degree in factor)

    return frozenset(Term(term.own, one(term.factor)) for term in terms)


def summed(terms: Terms) -> Terms:
    """After a sum over the rows."""
    rows = frozenset([(COUNT, Fraction(1))])
    return frozenset(term if term.own else Term(False, times(term.factor, rows)) for term in settled(terms))
