"""The proof that micro-batches make the large batch's update: the same rows at once and in parts, compared.

It is the same for every framework, and sees gradients as arrays by name. A framework's adapter is a `Runner`: it runs
some rows at once or in micro-batches, each time from the same state, and measures how far arrays are from each other. A
proof looks at few rows and refuses, a check looks at all of them and reports. Both ask the same, in this order:

    runner.run(None)            what a plain loop makes of these rows
    runner.run((rows, sizes))   what the updates make of them, in one or several ways to cut them
    the relative error of each loss, gradient and buffer, max|a - b| / max|b|: more than the dtype's rounding?
    runner.moved(seed, far=True)    is it there at parameters nearby, too? Where a sign decides, as in a ReLU at 0,
                                rounding makes any difference, but at these parameters alone.
    runner.moved(seed)          and more than the rows at once move there with the parameters' last bits? Where large
                                terms cancel each other, all that is left of them is rounding.
    beyond all of that?         why, and an error or a record that names it
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from random import Random
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from gradaccum.core.equivalence import Cause, Difference, Equivalence, Part, limits_of
from gradaccum.core.sizes import even_sizes

Array = Any
"""An array of some framework. None stands for a gradient that never arrived, which is zero."""
Key = tuple[Part, str]
Way = tuple[Sequence[int], Sequence[int]]
"""A way to cut rows: their order, and the sizes of the micro-batches in it."""
Result = TypeVar("Result")

ROWS, ENOUGH, GROUPS = 16, 8, 3
"""Rows of a proof at most; rows from which on more tell little; and groups of rows at least."""
OFTEN = 1024
"""Batches after which a proof is repeated at the latest."""
ATTEMPTS = 8
"""Batches in a row with nothing to compare, before no more is tried."""
SMALL = 1e-3
"""A gradient that is smaller than the largest one by this factor is measured by that one: all of it may be rounding."""
NEARBY, ELSEWHERE = 16, 2
"""How often parameters are moved by their last bits; and by half of their digits."""
TIMES, TIMES_IN_HALF = 32, 2
"""A difference is rounding up to so many times what moving the last bits of the parameters makes of the result."""
DRAWN, ALIKE = 32, 0.02
"""Orders of rows that are drawn at most; and shares of a weight up to which two are alike."""
IN_FLOAT64 = 1e-9
"""What a comparison in float64 allows."""

_LAST_PLACE = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def rounding(dtype: str, device: str = "cpu") -> float:
    """The largest relative difference that rounding makes, with room for other kernels at other sizes.

    Relative to the largest entry of the tensor that is compared. float32 has more room on accelerators, whose products
    may have 10 bits (TF32).

    Example:
        >>> rounding("float64"), rounding("torch.float32"), rounding("float32", "cuda"), rounding("bfloat16")
        (1e-09, 0.0001, 0.005, 0.05)
    """
    dtype = dtype.removeprefix("torch.").replace("complex128", "float64").replace("complex64", "float32")
    return {"float64": IN_FLOAT64, "float32": 1e-4 if device == "cpu" else 5e-3}.get(dtype, 5e-2)


def last_place(dtype: str) -> float:
    """A relative difference in the last place of a dtype: what a single rounding is, of half a dtype's width.

    Gradients that cancel out (of a bias before a BatchNormalization) are nothing but such roundings: each of the terms
    that cancel is off by this, however small their sum is. What moving the weights by so much changes tells them.
    """
    return _LAST_PLACE.get(dtype, _LAST_PLACE["float32"])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What some rows leave behind: arrays by name."""

    losses: Mapping[str, Array]
    """`"loss"`; the losses by name; or a module's outputs by path."""
    gradients: Mapping[str, Array | None]
    buffers: Mapping[str, Array] | None = dataclasses.field(default_factory=dict)
    """None where they aren't to be compared."""
    floors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The smallest scale by which an array's error is measured, where it averages what nearly cancels."""
    weighs: bool = True
    """False of micro-batches whose total weight is 0, with which no update is made."""

    def arrived(self) -> list[Array]:
        """The gradients that there are."""
        return [gradient for gradient in self.gradients.values() if gradient is not None]

    def parts(self) -> dict[Key, Array | None]:
        named = {"loss": self.losses, "gradient": self.gradients, "buffer": self.buffers or {}}
        return {(part, name): array for part, arrays in named.items() for name, array in arrays.items()}  # type: ignore[misc]  # one of the three


class Measured(NamedTuple):
    """How far an array is from another one."""

    distance: float
    """`max|a - b|`; inf for other shapes, or where only one of both is finite."""
    scale: float
    """`max|b|` over its finite numbers."""
    entries: int
    finite: bool = True
    """Whether all numbers of b are."""

    def error(self, floor: float = 0.0) -> float:
        scale = max(self.scale, floor)
        return self.distance / scale if scale else (math.inf if self.distance else 0.0)


class Runner:
    """What the adapter of a framework does for a proof: it runs `rows` rows."""

    rows: int
    precision: str
    """The narrowest dtype that was computed in so far."""
    device: str = "cpu"
    compiles: bool = False
    """Whether micro-batches of another size take long, for the first time."""

    @property
    def tolerance(self) -> float:
        """The relative error that is rounding."""
        return rounding(self.precision, self.device)

    def run(self, way: Way | None) -> Outcome:
        """What rows leave in these micro-batches, as updates make them; None: all rows at once, by a plain loop.

        It starts from the same state each time, moves nothing, and random numbers follow their rows.
        """
        raise NotImplementedError

    def moved(self, seed: int, *, far: bool = False) -> contextlib.AbstractContextManager[Runner]:
        """The same where parameters have other last bits, drawn with this seed; `far`: other latter halves."""
        raise NotImplementedError

    def measure(self, pairs: Sequence[tuple[Array | None, Array | None]]) -> list[Measured]:
        """Each first array against its second one. None stands for zeros."""
        raise NotImplementedError

    def is_finite(self, arrays: Sequence[Array]) -> bool:
        raise NotImplementedError

    def lower_scale(self) -> bool:
        """Gradients have overflowed. Returns whether the loss has a lower scale from now on."""
        return False

    def replace_noise(self) -> bool:
        """Random numbers were drawn that belong to no row. Returns whether they are their mean from now on."""
        return False

    def is_out_of_memory(self, error: Exception) -> bool:
        return False


# Comparing.

SomeRunner = TypeVar("SomeRunner", bound=Runner)


class Gap(NamedTuple):
    """How far an array is from the large batch's."""

    error: float
    distance: float
    entries: int
    finite: bool = True


class Compared(NamedTuple):
    """One way to cut the rows, and what it made different; nothing in particular where it raised."""

    way: Way
    gaps: dict[Key, Gap]
    failed: bool = False

    @property
    def error(self) -> float:
        return math.inf if self.failed else max((gap.error for gap in self.gaps.values()), default=0.0)


class WeightlessError(ValueError):
    """The rows weigh nothing, so that no update is made with them."""


class Comparison(Generic[SomeRunner]):
    """The same rows at once and in micro-batches, cut in one or several ways.

    `failed` says what becomes of a way that raises: `"skip"` leaves it out where others run, since the loss may have
    its own idea of which rows go together; `"differs"` makes it an infinite difference; or `"raise"`.
    """

    def __init__(
        self, runner: SomeRunner, ways: Sequence[Way], failed: Literal["skip", "differs", "raise"] = "skip"
    ) -> None:
        self.runner, self.ways, self.failed = runner, ways, failed
        self.found: list[Difference] | None = None  # the largest difference of each array; None without any
        self.compared: list[Compared] = []  # the ways that have run
        self.error: Exception | None = None  # of the last way that could not
        self.weighs = True  # whether these rows do

    def restart(self) -> None:
        vars(self).pop("large", None)

    @functools.cached_property
    def large(self) -> Outcome:
        return self.runner.run(None)

    def check_loss(self) -> None:
        """Raise a ValueError where the large batch's loss isn't finite."""
        for loss in self.large.losses.values():
            if not self.runner.is_finite([loss]):
                raise ValueError(f"The large batch's own loss is {loss}: there is nothing to compare.")

    def differences(self) -> list[Difference] | None:
        """The largest difference of each array over all ways; None without finite gradients, or weights, to compare.

        Raises what the last way raised, where none could run.
        """
        arrived = self.large.arrived()
        if self.failed == "skip" and not (arrived and self.runner.is_finite([*self.large.losses.values()])):
            return None
        self.compared = [*self._all_ways()]
        if not self.weighs:
            return None
        finite = self._is_finite(arrived)
        self.compared = self.compared if finite else []
        self.found = worst(self.compared) or None
        if self._starts_over(finite):
            self.restart()
            return self.differences()
        if finite and not self.compared:
            assert self.error is not None
            raise self.error
        return self.found

    def judged(self) -> list[Difference] | None:
        """The same; of what rounding makes at these parameters, the error is that at others nearby."""
        if self.differences() is None:
            return None
        wrong = {(one.part, one.name) for one in self.wrong}
        excused, beside = dict[Key, float](), dict.fromkeys(wrong, 0.0)
        for seed in range(ELSEWHERE if wrong else 0):
            equal, rounded = dict[Key, float](), dict[Key, float]()
            with contextlib.suppress(Exception), self.runner.moved(seed, far=True) as there:
                other = Comparison(there, self.ways, self.failed)
                equal, rounded = other._of_rounding(wrong - excused.keys(), beside.keys())
            excused |= equal  # where it is equal once, it hangs on these parameters; large terms cancel at all of them
            beside = rounded
        excused = beside | excused
        self.compared = [
            one._replace(gaps={k: g._replace(error=excused.get(k, g.error)) for k, g in one.gaps.items()})
            for one in self.compared
        ]
        self.found = worst(self.compared)
        return self.found

    @property
    def wrong(self) -> list[Difference]:
        """What is found to differ by more than rounding."""
        allowed = self.runner.tolerance
        return [difference for difference in self.found or () if not difference.error <= allowed]

    def failing(self, tolerance: float) -> list[Way]:
        """The ways that differ by more, the worst first."""
        wrong = [one for one in self.compared if not one.error <= tolerance]
        return [one.way for one in sorted(wrong, key=lambda one: -one.error)]

    def raised(self) -> list[Cause]:
        """What the loss raises in micro-batches, and not on the large batch."""
        if self.error is None:
            return []
        sizes = " + ".join(map(str, next(one.way[1] for one in self.compared if one.failed)))
        first_line = (str(self.error).strip().splitlines() or [""])[0]
        message = f"rows the loss raises {type(self.error).__name__}: {first_line} The large batch does not."
        return [Cause("error", "loss", f"In micro-batches of {sizes} {message} Write it for any number of rows.")]

    def unrepeatable(self) -> list[Difference]:
        """How far the rows at once are from themselves when they run once more."""
        return differences_between(self.runner, self.runner.run(None), self.large)

    def record(
        self, differences: Sequence[Difference], causes: Sequence[Cause], tolerance: float, notes: Sequence[str] = ()
    ) -> Equivalence:
        """What a check of all rows has found."""
        return Equivalence(
            tuple(differences),
            tolerance,
            tuple(causes),
            rows=self.runner.rows,
            partitions=tuple(tuple(sizes) for _, sizes in self.ways),
            notes=(*notes, *limits_of(self.runner.rows)),
            precision=self.runner.precision,
            device=self.runner.device,
        )

    def _is_finite(self, gradients: Sequence[Array]) -> bool:
        """Whether those of the rows at once are, as reading them has shown, if anything was compared with them."""
        if self.failed != "skip":
            return True
        gaps = [gap for one in self.compared[:1] for (part, _), gap in one.gaps.items() if part == "gradient"]
        return all(gap.finite for gap in gaps) if gaps else self.runner.is_finite(gradients)

    def _starts_over(self, finite: bool) -> bool:
        """Whether all of it is to run again, with a lower scale or without noise."""
        overflown = not finite or any(d.part == "gradient" and math.isinf(d.error) for d in self.found or ())
        return (overflown and self.runner.lower_scale()) or (finite and self.runner.replace_noise())

    def _all_ways(self) -> Iterator[Compared]:
        large = self.large
        for way in self.ways:
            try:
                micro_batches = self.runner.run(way)
            except Exception as error:
                if self.failed == "raise" or self.runner.is_out_of_memory(error):
                    raise
                self.error = error
                if self.failed == "differs":
                    yield Compared(way, {}, failed=True)
                continue
            self.weighs = micro_batches.weighs
            if not self.weighs and self.failed != "skip":
                raise WeightlessError(
                    "The total weight of this batch is 0, so no update is made with it: there is nothing to compare."
                )
            yield Compared(way, _gaps(self.runner, micro_batches, large))

    def _of_rounding(self, keys: Set[Key], closely: Set[Key]) -> tuple[dict[Key, float], dict[Key, float]]:
        """The errors of those that are equal here, and of those that are beside large terms that cancel each other."""
        if self.differences() is None:
            return {}, {}
        gaps = {key: gap for key, gap in _largest(self.compared).items() if key in keys}
        equal = {key: gap.error for key, gap in gaps.items() if gap.error <= self.runner.tolerance}
        left, found = (gaps.keys() & closely) - equal.keys(), dict[Key, float]()
        precision, terms = self.runner.precision, dict.fromkeys(left, 0.0)
        unit, times = last_place(precision), TIMES if precision in ("float64", "float32") else TIMES_IN_HALF
        moves = self._terms(unit)
        while left and (sizes := next(moves, None)) is not None:
            for key in [*left]:
                terms[key] = max(terms[key], sizes.get(key, 0.0))
                if gaps[key].distance <= times * unit * terms[key]:
                    found[key] = gaps[key].distance / terms[key]
                    left.remove(key)
        return equal, found

    def _terms(self, unit: float) -> Iterator[dict[Key, float]]:
        """How large the terms of a sum must be: by what last bits change in it, and by single micro-batches."""
        for seed in range(NEARBY):
            with self.runner.moved(seed) as there:
                gaps = _gaps(self.runner, there.run(None), self.large)
            yield {key: gap.distance / unit for key, gap in gaps.items() if math.isfinite(gap.distance)}
        closely = self.failed != "raise" and not self.runner.compiles and unit < 1e-6  # in half it would allow too much
        for order, sizes in self.ways if closely else ():
            rows = iter(order)
            for size in sizes:
                with contextlib.suppress(Exception):  # the loss may have its own idea of which rows go together
                    part = self.runner.run(([*itertools.islice(rows, size)], [size])).parts()
                    arrays = {k: array for k, array in part.items() if array is not None and k[0] != "buffer"}
                    scales = self.runner.measure([(array, None) for array in arrays.values()])
                    yield {k: one.distance for k, one in zip(arrays, scales) if math.isfinite(one.distance)}


def _gaps(runner: Runner, actual: Outcome, expected: Outcome) -> dict[Key, Gap]:
    """How far each array is from the expected one, as relative errors and as distances.

    Losses and buffers that either lacks are infinitely far. A gradient that is zero but for rounding is measured by the
    largest one.
    """
    pairs, absent = _pairs(actual, expected)
    measured = dict(zip(pairs, runner.measure(list(pairs.values())), strict=True))
    measured |= dict.fromkeys(absent, Measured(math.inf, 1.0, 1))
    largest = max((one.scale for (part, _), one in measured.items() if part == "gradient"), default=0.0)
    found = {}
    for (part, name), one in measured.items():
        if part == "buffer" and not (one.distance or one.scale):  # a buffer of zeros, or a move that isn't one
            continue
        floor = max(expected.floors.get(name, 0.0), SMALL * largest if part == "gradient" else 0.0)
        found[part, name] = Gap(one.error(floor), one.distance, one.entries if part != "loss" else 1, one.finite)
    return found


def _pairs(actual: Outcome, expected: Outcome) -> tuple[dict[Key, tuple[Array, Array]], list[Key]]:
    """What there is to compare, as it isn't one object, and losses and buffers that one of both lacks."""
    theirs, ours = actual.parts(), expected.parts()
    needed = ("loss",) if actual.buffers is None else ("loss", "buffer")
    absent = [key for key in ours if key not in theirs and key[0] in needed]
    absent += [key for key in theirs if key not in ours and key[0] == "loss"]
    pairs = {key: (theirs.get(key), array) for key, array in ours.items() if key in theirs or key[0] == "gradient"}
    return {key: (a, b) for key, (a, b) in pairs.items() if a is not b}, absent


def differences_between(runner: Runner, actual: Outcome, expected: Outcome) -> list[Difference]:
    gaps = _gaps(runner, actual, expected)
    return [Difference(name, gap.error, part, gap.entries) for (part, name), gap in gaps.items()]


def _largest(compared: Iterable[Compared]) -> dict[Key, Gap]:
    """Each array's largest gaps in any of these."""
    found: dict[Key, Gap] = {}
    for one in compared:
        gaps: dict[Key, Gap] = {("loss", "loss"): Gap(math.inf, math.inf, 1)} if one.failed else one.gaps
        for key, gap in gaps.items():
            known = found.get(key)
            if known is not None:
                gap = gap._replace(error=max(known.error, gap.error), distance=max(known.distance, gap.distance))
            found[key] = gap
    return found


def worst(compared: Iterable[Compared]) -> list[Difference]:
    """Each array's largest difference in any of these."""
    return [Difference(name, gap.error, part, gap.entries) for (part, name), gap in _largest(compared).items()]


def with_fewer_rows(
    attempt: Callable[[int], Result], rows: int, least: int, is_out_of_memory: Callable[[Exception], bool]
) -> Result:
    """What `attempt(rows)` returns, with half as many rows wherever memory runs out, down to the least."""
    while True:
        try:
            return attempt(rows)
        except Exception as error:
            if not is_out_of_memory(error) or rows <= least:
                raise
        rows = max(rows // 2, least)  # out of reach of the error's frames, which hold what took the memory


# When, and which rows.


class ProofSchedule:
    """When a batch is to be proven, and how much of it: the first of each kind, and the 2nd, 4th, 8th, ... of all.

    The rows are cut into three parts, and where it is repeated into two, in one way and in the other.

    Example:
        >>> schedule = ProofSchedule()
        >>> [schedule.is_due(new_kind=number == 1) for number in range(1, 10)]
        [True, True, False, True, False, False, False, True, False]
    """

    def __init__(self) -> None:
        self.batches = 0
        self.repeated = False  # whether the latest batch is of a kind that has been proven
        self._postponed = False
        self._looked_at = self._repetitions = 0

    def is_due(self, new_kind: bool) -> bool:
        self.batches += 1
        self.repeated = not new_kind
        postponed, self._postponed = self._postponed, False
        return postponed or new_kind or self.batches & (self.batches - 1) == 0 or self.batches % OFTEN == 0

    def postpone(self) -> None:
        self._postponed = True

    def scope(self, size: int | None) -> tuple[int, int]:
        """Rows to look at, of a batch in micro-batches of `size` if that is known, and the way to cut them."""
        rows = ROWS if size is None else min(ROWS, max(ENOUGH, 2 * size))
        if size is not None and self.batches == 2:
            rows = max(rows, size)  # of what a micro-batch holds, some may begin above so many rows
        if not self.repeated or rows > self._looked_at:
            self._looked_at = rows
            return rows, 0
        self._repetitions += 1
        return min(rows, ENOUGH), 2 + self._repetitions % 2


def informative_rows(
    order: Sequence[int], sorts: Iterable[tuple[int, Sequence[int]]], ends: Iterable[int], most: int
) -> list[int]:
    """Up to so many rows that tell most, in this order of all rows.

    Of each of the `sorts` of rows (with a missing label, padding, a weight of zero, a class), of which the number and
    three rows are given, there are three, the rarest sorts first: others wouldn't hold them, and what a loss does with
    them shows where one part has more of them, as two can't share three equally. They are five eighths of the rows at
    most, and with the `ends`, rows with the least and the most of something, seven. The rest is evenly spread over the
    order.

    Example:
        >>> informative_rows([3, 1, 2, 0, 4], [(3, [1, 2, 4]), (1, [0]), (5, [0, 1, 2])], [4], 4)
        [3, 1, 0, 4]
    """
    rarest = sorted((sort for sort in sorts if sort[0] < len(order)), key=lambda sort: sort[0])
    rare = [row for sort in rarest for row in sort[1][:3]]
    others = [order[place * (len(order) - 1) // max(1, most - 1)] for place in range(most)]
    chosen = dict[int, None]()
    for candidates, limit in ((rare, 5 * most // 8), (ends, 7 * most // 8), ([*others, *order], most)):
        for row in candidates:
            if len(chosen) >= max(1, limit):
                break
            chosen[row] = None
    return [row for row in order if row in chosen]


def informative_units(rows: Sequence[int], units: Sequence[Sequence[int]], most: int) -> list[int]:
    """The groups (`units`) of these informative rows, from both ends; with `most` rows together, but 3 at least."""
    of_row = {row: place for place, unit in enumerate(units) for row in unit}
    places = [of_row[row] for row in rows]
    ends = [places[place // 2] if place % 2 == 0 else places[-1 - place // 2] for place in range(len(places))]
    picked: list[int] = []
    for place in dict.fromkeys([*ends, *range(len(units))]):
        if len(picked) >= GROUPS and sum(len(units[known]) for known in (*picked, place)) > most:
            break
        picked.append(place)
    picked.sort(key=lambda place: places.index(place) if place in places else len(places))
    return [row for place in picked for row in units[place]]


# Ways to cut rows. Each of the `units` has the rows that belong together.


def telling_order(sizes: Sequence[int], columns: Iterable[Sequence[float]], lengths: Sequence[int] = ()) -> list[int]:
    """An order of units in which parts of these sizes tell a wrong weight from the right one.

    Each of the `columns` has a number for each unit: what a loss may divide by, such as 1 where a mask is, or tokens
    that count. A part's right weight is its sum. Orders are drawn until no frequent wrong weight has the same
    proportions, or as few as possible. `lengths` are the units' rows, one each by default.

    Example:
        >>> order = telling_order([2, 2, 4], [[0, 0, 0, 0, 0, 1, 1, 1]])
        >>> [sum(row > 4 for row in part) for part in (order[:2], order[2:4], order[4:])]  # of which so many count
        [2, 0, 1]
    """
    count, lengths = sum(sizes), lengths or [1] * sum(sizes)
    varying = (tuple(column) for column in columns if min(column) >= 0 and len({*column}) > 1)
    known = {column for column in varying if sum(map(bool, column)) > 1 and math.isfinite(sum(column))}
    ordered = sorted(known, key=lambda column: (len({*column}), column))  # those of few numbers decide soonest
    best, fewest = list[int](), math.inf
    for order in _orders(count):
        units, alike = iter(order), 0
        parts = [[*itertools.islice(units, size)] for size in sizes]
        rows = tuple(sum(lengths[unit] for unit in part) for part in parts)
        for column in ordered:
            alike += _weights_alike(rows, tuple(tuple(sorted(column[unit] for unit in part)) for part in parts))
            if alike >= fewest:
                break
        else:
            best, fewest = order, alike
        if not fewest:
            break
    return [*best]


@functools.cache
def _orders(count: int) -> list[list[int]]:
    return [Random(seed).sample(range(count), count) for seed in range(DRAWN)]


_WRONG_WEIGHTS: tuple[tuple[Callable[[int, Sequence[float]], float], bool], ...] = (
    (lambda rows, values: rows * any(values), False),
    (lambda rows, values: rows * max(values), False),
    (lambda rows, values: sum(values) / rows, False),
    (lambda rows, values: sum(map(bool, values)), False),
    (lambda rows, values: any(values), True),
    (lambda rows, values: max(values), True),
    (lambda rows, values: rows * min(values), True),
)
"""Of a part's rows and of what counts in each. Some can't be told where less than three units count."""


@functools.lru_cache(maxsize=1024)
def _weights_alike(rows: tuple[int, ...], parts: tuple[tuple[float, ...], ...]) -> int:
    """How many wrong weights of these parts are in the same proportions as their sums."""
    counting, sums = [value for values in parts for value in values if value], [*map(sum, parts)]
    largest, found = max(sums), 0
    place = sums.index(largest)
    for rule, needs_three in _WRONG_WEIGHTS:
        if not needs_three or len(counting) > 2:
            weight = rule(rows[place], parts[place])
            near = ALIKE * weight * largest
            shares = zip(rows, parts, sums)
            found += all(abs(rule(count, part) * largest - own * weight) <= near for count, part, own in shares)
    return found - (len({*counting}) == 1)  # the number of units that count is right then


def interleaved_ways(units: Sequence[Sequence[int]], columns: Iterable[Sequence[float]] = ()) -> list[Way]:
    """Ways to cut sorted rows into unequal parts, those of two units or more: two into three parts, and two into two.

    The first one tells by the `columns`, numbers of each row, what parts weigh (`telling_order`), the second one mixes
    the rows. In the last two, one part has less than another of what the rows are sorted by, and neighbours are apart
    in at least one of both.

    Example:
        >>> units = [[0], [1], [2], [3], [4], [5], [6], [7]]
        >>> for way in interleaved_ways(units, [[0, 0, 0, 0, 0, 1, 1, 1]]): print(way)
        ([6, 7, 3, 0, 2, 5, 1, 4], [2, 2, 4])
        ([0, 3, 6, 1, 4, 7, 2, 5], [4, 2, 2])
        ([0, 2, 4, 1, 3, 5, 6, 7], [3, 5])
        ([0, 1, 2, 4, 6, 3, 5, 7], [5, 3])
    """
    count, order = len(units), list(range(len(units)))
    first, mixed = max(2, count // 3), [*order[::3], *order[1::3], *order[2::3]]
    if count < 4:
        plans = [(order, [1, count - 1]), (order[::-1], [1, count - 1])][: count - 1]
    elif count < 6:
        plans = [(order, [first, count - first]), (mixed, [count - 2, 2])]
    else:
        few, sizes = 3 * count // 8, [first, max(2, (count - first + 1) // 3), 0]
        sizes[2] = count - sum(sizes)
        low, high = order[: 2 * few : 2], order[count % 2 + 1 :: 2][-few:]
        above, below = ([unit for unit in order if unit not in part] for part in (low, high))
        plans = [
            (order, sizes),
            (mixed, [count - first - 2, 2, first]),
            ([*low, *above], [few, count - few]),
            ([*below, *high], [count - few, few]),
        ]
    of_units = [[sum(column[row] for row in unit) for unit in units] for column in columns]
    plans[0] = telling_order(plans[0][1], of_units, [*map(len, units)]), plans[0][1]
    return _of_units(units, plans)


def ragged_ways(units: Sequence[Sequence[int]]) -> list[Way]:
    """Ways to cut rows for a check: ragged in order, ragged and shuffled, small pieces."""
    count, order = len(units), list(range(len(units)))
    plans = [(order, _ragged(count, 2)), (Random(0).sample(order, count), _ragged(count, 3))]
    if count >= 8:
        plans.append((order, _ragged(count, min(count // 2, 7))))
    return _of_units(units, plans)


def _ragged(count: int, parts: int) -> list[int]:
    """Sizes that fall as 1 / n does, each of two or more where there are enough, so that weights of all sizes occur."""
    least = 2 if count >= 4 else 1
    parts = max(1, min(parts, count // least))
    sizes = [least] * parts
    for _ in range(count - least * parts):
        sizes[max(range(parts), key=lambda part: 1 / ((1 + part) * (1 + sizes[part] - least)))] += 1
    return sizes


def _of_units(units: Sequence[Sequence[int]], plans: Sequence[tuple[list[int], list[int]]]) -> list[Way]:
    ways: list[Way] = []
    for places, counts in plans:
        sizes = iter([len(units[place]) for place in places])
        rows = [row for place in places for row in units[place]]
        ways.append((rows, [sum(itertools.islice(sizes, count)) for count in counts]))
    return ways


def even_ways(rows: int, size: int | None = None, columns: Iterable[Sequence[float]] = ()) -> list[Way]:
    """Ways for a check into even micro-batches, as compiled steps run them: of this size, ragged, and shuffled.

    Where no ragged ones are even, all but the shuffled ones have a single row. `columns` are as for `telling_order`.

    Example:
        >>> [sizes for _, sizes in even_ways(12)]
        [[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [4, 4, 4]]
    """
    ragged = ragged_size(rows)
    sizes = even_sizes(rows, ragged or 1)
    shuffled = even_sizes(rows, ragged or max(rows // 3, min(2, rows - 1)))
    given: list[Way] = [] if size is None or size >= rows else [(range(rows), even_sizes(rows, size))]
    return [*given, (range(rows), sizes), (telling_order(shuffled, columns), shuffled)]


def ragged_size(rows: int) -> int | None:
    """The largest micro-batch size that doesn't divide so many rows evenly; one that makes three parts, if possible."""
    ragged = [size for size in range(rows - 1, 0, -1) if rows % -(-rows // size)]
    return next((size for size in ragged if -(-rows // size) > 2), ragged[0] if ragged else None)
