"""What is known of a number inside a loss: which axis carries the rows, and how it follows from them.

A number is a sum of terms. A term is either the same whatever the rows are, or an `own` one: of an array with rows,
each row's own; of one without, a sum over the rows. It is multiplied by a factor: powers of the number of rows, and of
other numbers that take all rows to know, such as the sum of a mask.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = [
    "COUNT", "FINITE", "LIFTED", "ONE", "CannotTell", "Factor", "Known", "MixesRows", "Place", "Source", "Symbol",
    "Term", "Terms", "exponent", "limited", "power", "times",
]  # fmt: skip

Factor = frozenset[tuple[Any, Fraction]]
"""Powers of symbols; nothing is 1."""

ONE: Factor = frozenset()


class Term(NamedTuple):
    """A part of a number."""

    own: bool
    """Whether it is each row's own, or, without an axis of rows, a sum over rows; else it is the same for any rows."""
    factor: Factor = ONE


Terms = frozenset[Term]
"""A number's parts; none for 0."""


class Symbol(NamedTuple):
    """A number that takes all rows to know, where it stands as a factor.

    Attributes:
        number: Which: equal for what is computed alike.
        kind: "count" for what hangs on the number of rows alone, "sum" for a sum over rows, "position" for a row's
            place in the batch, "random" for numbers that are drawn for rows from a key that all micro-batches share,
            and "mixed" for any other function of several rows.
        free: Whether it follows from the batch alone, not from what is differentiated.
        scalar: Whether it is one number.
        source: What has computed it.
        origin: The number of the first sum over rows that it comes from.
    """

    number: Any
    kind: str
    free: bool = True
    scalar: bool = True
    source: Any = None
    origin: Any = None

    def __hash__(self) -> int:
        return hash((self.number, self.kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and (self.number, self.kind) == (other.number, other.kind)


COUNT = Symbol("rows", "count")
"""The number of rows."""
FINITE = "finite"
"""What `Known.guard` asks where it looks for NaN."""
_LIMIT = 12
"""Terms of a number that are told apart."""


class Place(NamedTuple):
    """Where an array has its rows: in an axis of `outer * rows * inner` entries."""

    axis: int
    outer: int = 1
    inner: int = 1


LIFTED = Place(-1)
"""One row of an array, in the body of a loop over rows."""


class Source(NamedTuple):
    """What has computed a number.

    Attributes:
        primitive: The operation's name.
        info: What JAX knows of who asked for it.
    """

    primitive: str
    info: Any = None


class MixesRows(Exception):
    """A number that takes several rows to know, in a way that terms can't say."""


class CannotTell(Exception):
    """An operation that this analysis knows nothing about."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of an array.

    Attributes:
        terms: Its parts.
        place: Where its rows are; None without such an axis.
        number: Equal for arrays that are computed alike.
        scalar: Whether all entries (of a row) are one number.
        values: The number itself at both counts of rows, where it is known.
        position: Whether it counts the rows: 0, 1, 2, ...
        guard: What it asks: the number of a sum, whether there is anything in it; or `FINITE`, whether there is a NaN.
        fresh: Whether it hangs on what is another one for each micro-batch: its key, or its state.
        free: Whether it does not hang on what is differentiated.
        sums: The sums over rows that have gone into it: their numbers, and sources.
        core: Of a sum over rows times what is known, the number of that sum, and its source.
        whole: Whether its entries are whole numbers.
        doubts: What was taken for true of it, and need not be: messages.
        state: The leaves of the state, by their places among the inputs, that it is computed from.
        parts: Of what was concatenated along the last axis, the arrays, if they have one entry each.
    """

    terms: Terms
    place: Place | None = None
    number: Any = None
    scalar: bool = False
    values: tuple[Any, Any] | None = None
    position: bool = False
    guard: Any = None
    fresh: bool = False
    free: bool = True
    sums: frozenset[Any] = frozenset()
    core: tuple[Any, Any] | None = None
    whole: bool = False
    doubts: frozenset[str] = frozenset()
    state: frozenset[int] = frozenset()
    parts: tuple[Known, ...] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether it is the same for any rows."""
        return all(term == Term(False) for term in self.terms)

    def divides(self, number: Any) -> bool:
        """Whether it is this sum, or each part of it is divided by it: nothing where there is nothing in the sum."""
        is_divided = all(any(s.number == number and d < 0 for s, d in term.factor) for term in self.terms)
        return is_divided or (self.core is not None and self.core[0] == number)

    @property
    def factor(self) -> Factor | None:
        """What it is as a factor of others, if that is a product of symbols and of what is the same for any rows."""
        factors = {term.factor for term in self.terms}
        return next(iter(factors)) if len(factors) == 1 and not any(term.own for term in self.terms) else None

    def but(self, **changes: Any) -> Known:
        """The same, but for something."""
        return dataclasses.replace(self, **changes)


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


def limited(terms: set[Term] | frozenset[Term]) -> Terms:
    """The terms.

    Raises:
        CannotTell: They are too many.
    """
    if len(terms) > _LIMIT:
        raise CannotTell("too many denominators")
    return frozenset(terms)
