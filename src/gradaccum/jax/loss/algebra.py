"""What is known of an array: where its rows are, and what it is the sum of; and the algebra of that.

The idea stands on top of `judge`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Symbol = Any
"""The number of a sum over the rows, which is another one in each batch."""
Scale = tuple[float, ...]
"""What a number is multiplied by in each of some imagined batches, up to what all of them share; () is 1."""
ONE: Scale = ()
COUNT = "rows"
NONE = float("nan")
"""What a number is in a batch in which it is 0 / 0, or nothing is known of it."""
SAMPLES, _EMPTY = 8, 4
"""Imagined batches for each number of rows; in one of the first few of them a sum is 0."""
_ROUNDING = 1e-9
"""Of products of scales."""
_MOST = 12
"""Terms that a number may have."""


class Term(NamedTuple):
    """A summand: each row's own number, or one that is the same for any rows, times what takes all rows to know."""

    own: bool
    scale: Scale = ONE


Terms = frozenset[Term]
"""What a number is the sum of; none for 0."""
SHARED: Terms = frozenset([Term(False)])


class Place(NamedTuple):
    """Where an array has its rows: in an axis of `outer * rows * inner` entries."""

    axis: int
    outer: int = 1
    inner: int = 1


class Source(NamedTuple):
    """An operation of the loss, by JAX' `source_info`, and the number of what it computes; the smallest is first."""

    primitive: str
    info: Any = None
    number: int = -1


PAIRS, MOVED, FREE = "pairs", "moved", "free"
"""How a flaw may be taken back: an entry is of two rows, and the diagonal may be picked, until pairs are added up; rows
are in another order, until they meet others; or in a way that isn't followed: it may be the same for all batches."""


class Flaw(NamedTuple):
    """Why nothing is known of a number: rows are "mixed" in it, it follows from their "position" or in no known way
    from their "count", it is "random" for each row, or it is "unknown"; `soft`, if it may be taken back."""

    kind: str
    source: Source
    soft: str = ""
    why: str = ""

    @property
    def certain(self) -> bool:
        return self.kind == "random" or (self.kind != "unknown" and not self.soft)


class Lost(Exception):
    """Raised by a rule for an output that terms can't express: the `Flaw` that it has, by default where the rule is."""

    def __init__(self, kind: str, soft: str = "", source: Source | None = None, why: str = "") -> None:
        super().__init__(kind)
        self.kind, self.soft, self.source, self.why = kind, soft, source, why


def mixes(soft: str = "", source: Source | None = None) -> Lost:
    return Lost("mixed", soft, source)


def unknown(why: str) -> Lost:
    return Lost("unknown", why=why)


DIFFERENTIATED, FRESH, LOCAL, FLOWING = 1, 2, 4, 8
"""Bits of `Value.roots`: it follows from what is differentiated; from a key or a state that micro-batches don't share;
from one device's part of a sum over the rows of several; and a gradient flows through it. Those from `STATE` on are the
state's leaves."""
STATE = 16


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of an array."""

    terms: Terms = frozenset()
    place: Place | None = None  # where its rows are; None without such an axis
    flaw: Flaw | None = None  # if there is one, neither terms nor place count
    number: int = -1  # equal for arrays that are computed alike
    roots: int = 0  # what it follows from
    scalar: bool = False  # all entries (of a row) are one number
    integral: bool = False  # its entries are whole numbers
    positive: bool = False  # its entries are above 0
    lanes: tuple[Any, ...] | None = None  # if it follows from sums over the batch alone, what it is in imagined batches

    @property
    def own(self) -> bool:
        return any(term.own for term in self.terms)

    @property
    def depends(self) -> bool:
        """Whether it follows from rows."""
        return self.own or self.flaw is not None

    @property
    def axis(self) -> int:
        return -1 if self.place is None else self.place.axis

    @property
    def known(self) -> Any:
        """The number that it is in any batch, if it is one."""
        return self.lanes[0] if self.lanes is not None and len({*self.lanes}) == 1 else None

    @property
    def is_shared(self) -> bool:
        """Whether it is the same for any rows."""
        return self.terms <= SHARED and self.place is None and self.flaw is None

    @property
    def free(self) -> bool:
        """Whether it follows from the batch, and not from what is differentiated."""
        return not self.roots & DIFFERENTIATED

    def but(self, **changes: Any) -> Value:
        return dataclasses.replace(self, **changes)


def scaled(numbers: Iterable[float]) -> Scale:
    """These numbers, up to one that all of them share."""
    given = [x if math.isfinite(x) else NONE for x in numbers]
    last = next((x for x in reversed(given) if x == x and x), 1)
    found = tuple(NONE if x != x else float(f"{x / last:.12g}") for x in given)
    return ONE if all(abs(x - 1) <= _ROUNDING for x in found) else found


def is_one(scale: Scale) -> bool:
    """Whether it is 1 wherever it is a number."""
    return all(x != x or abs(x - 1) <= _ROUNDING for x in scale)


def is_empty(lane: int) -> bool:
    """Whether this batch is one in which a sum may be 0."""
    return lane % SAMPLES < _EMPTY


def times(a: Scale, b: Scale) -> Scale:
    return scaled(x * y for x, y in zip(a, b)) if a and b else a or b


def power(scale: Scale, degree: int) -> Scale:
    return scaled(x**degree if x or degree > 0 else NONE for x in scale)


def ordinary(scale: Scale) -> Scale:
    """Without the batches in which a sum is 0."""
    return scaled(NONE if is_empty(n) else x for n, x in enumerate(scale))


def is_choice(scale: Scale) -> bool:
    """Whether it is 1, or 0, but where a sum is 0."""
    found = {x for n, x in enumerate(scale) if not is_empty(n)}
    return len(found) < 2 and NONE not in found


def exponent(numbers: Sequence[float], rows: Sequence[int]) -> int | None:
    """The d of  numbers ~ rows ** d,  if there is one up to 2."""
    for degree in (0, 1, -1, 2, -2):
        parts = [number / count**degree for number, count in zip(numbers, rows)]
        if max(abs(part - parts[-1]) for part in parts) <= 1e-5 * abs(parts[-1]):
            return degree
    return None


class Batches:
    """Imagined batches, a few for each number of rows: what sums over the rows are in them."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.count = scaled(each for each in rows for _ in range(SAMPLES))  # the number of rows
        self._sums: dict[Symbol, tuple[float, ...]] = {}

    def sum_at(self, symbol: Symbol, value: Value) -> tuple[float, ...]:
        """What a sum is in each of them: once small, no two alike, and once 0 unless it adds up positive numbers."""
        if symbol not in self._sums:
            n, draw = len(self._sums), random.Random(len(self._sums)).randint
            numbers: list[float] = [draw(2, 99) for _ in range(_EMPTY)]  # which no sum of others equals
            numbers += [1 if value.integral else 0.25, draw(2, 99), draw(1000, 9999), draw(10**6, 10**7)]
            numbers[n % _EMPTY] *= value.positive
            self._sums[symbol] = tuple(numbers) * (len(self.count) // SAMPLES)
        return self._sums[symbol]

    def named(self, scale: Scale) -> Any:
        """The sum that this goes with where it isn't 0, or COUNT; "" for 1, and None for anything else."""
        sums = {"": ONE, COUNT: self.count} | {symbol: scaled(numbers) for symbol, numbers in self._sums.items()}
        found = {symbol: enumerate(times(scale, power(of, -1))) for symbol, of in sums.items()}
        return next(
            (at for at, each in found.items() if all(is_empty(n) or abs(x - 1) <= _ROUNDING for n, x in each)), None
        )

    def empty_in(self, lane: int) -> Symbol:
        """The first sum that is 0 in this batch, if there is one."""
        return next((symbol for symbol, numbers in self._sums.items() if not numbers[lane]), None)


def is_by_rows(scale: Scale) -> bool:
    """Whether it follows from the number of rows alone."""
    each = [{x for x in scale[n : n + SAMPLES] if x == x} for n in range(0, len(scale), SAMPLES)]
    return all(len(numbers) <= 1 for numbers in each)


def union(values: Iterable[Value]) -> Terms:
    """Of a sum, and of whatever is linear in all of these numbers."""
    return limited(term for value in values for term in value.terms)


def limited(terms: Iterable[Term]) -> Terms:
    found = frozenset(terms)
    if len(found) > _MOST:
        raise unknown("too many denominators")
    return found


def counted(terms: Terms, counts: Sequence[float]) -> Terms:
    """These terms in the batches in which they count, and 0 in the others."""
    scales = {term: scaled(x * y if y else 0.0 for x, y in zip(term.scale or counts, counts)) for term in terms}
    return frozenset(Term(term.own, scale) for term, scale in scales.items() if scale == ONE or any(scale))


def common_place(values: Iterable[Value]) -> Place | None:
    """Where arrays of one shape have their rows."""
    places = {value.place: value.own for value in values if value.place is not None}
    if len(own := [place for place in places if places[place]] or list(places)) > 1:
        raise mixes(PAIRS)
    return own[0] if own else None


def roots_of(values: Iterable[Value]) -> int:
    return functools.reduce(lambda roots, value: roots | value.roots, values, 0)
