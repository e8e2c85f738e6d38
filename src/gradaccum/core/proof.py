"""The proof that micro-batches make the large batch's update: the same rows at once and in parts, compared.

It is the same for every framework, and sees gradients as arrays by name. A framework's adapter is a `Runner`: it runs
some rows at once or in micro-batches, each time from the same state, and measures how far arrays are from each other. A
proof then goes

    runner.run(rows, None)      what a plain loop makes of these rows
    runner.run(rows, sizes)     what the updates make of them, in one or two ways to cut them
    relative error of each loss, gradient and buffer    max|a - b| / max|b|
    beyond what rounding makes?                          runner.nearby(rows): the parameters' last bits moved
    beyond that?                                         why, and an error that names it
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from gradaccum.core.equivalence import Difference, Part

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
TIMES, TIMES_IN_HALF = 32, 2
"""A difference is rounding up to so many times what moving the last bits of the parameters makes of the result."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What some rows leave behind: arrays by name."""

    losses: Mapping[str, Array]
    """`"loss"`; the losses by name; or a module's outputs by path."""
    gradients: Mapping[str, Array | None]
    buffers: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    floors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The smallest scale by which an array's error is measured, where it averages what nearly cancels."""

    def parts(self) -> Iterator[tuple[Key, Array | None]]:
        for part, arrays in (("loss", self.losses), ("gradient", self.gradients), ("buffer", self.buffers)):
            for name, array in arrays.items():
                yield (part, name), array  # type: ignore[misc]  # one of the three


class Measured(NamedTuple):
    """How far an array is from another one."""

    distance: float
    """`max|a - b|`; inf for other shapes, or where only one of both is finite."""
    scale: float
    """`max|b|` over its finite numbers."""
    entries: int

    def error(self, floor: float = 0.0) -> float:
        scale = max(self.scale, floor)
        return self.distance / scale if scale else (math.inf if self.distance else 0.0)


class Runner:
    """What the adapter of a framework does for a proof."""

    tolerance: float
    """The relative error that is rounding in the narrowest dtype that was computed in so far."""
    in_half: bool = False
    """Whether that dtype has 16 bits or fewer."""

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None) -> Outcome:
        """What these rows leave in micro-batches of these sizes, as updates make them; None: at once, by a plain loop.

        It starts from the same state each time, moves nothing, and random numbers follow their rows.
        """
        raise NotImplementedError

    def nearby(self, rows: Sequence[int]) -> Iterable[Outcome]:
        """The rows at once, with parameters whose last bits are others: what rounding makes of them."""
        return ()

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


class Compared(NamedTuple):
    """One way to cut the rows, and what it made different."""

    way: Way
    differences: list[Difference]
    distances: dict[Key, float]

    @property
    def error(self) -> float:
        return max((difference.error for difference in self.differences), default=0.0)


class Comparison:
    """The same rows at once and in micro-batches, cut in one or several ways.

    `failed` says what becomes of a way that raises: `"skip"` leaves it out where others run, since the loss may have
    its own idea of which rows go together; `"differs"` makes it an infinite difference; or `"raise"`.
    """

    def __init__(
        self,
        runner: Runner,
        rows: Sequence[int],
        ways: Sequence[Way],
        failed: Literal["skip", "differs", "raise"] = "skip",
    ) -> None:
        self.runner, self.rows, self.ways, self.failed = runner, rows, ways, failed
        self.compared: list[Compared] = []  # the ways that have run
        self.error: Exception | None = None  # of the last way that could not

    def restart(self) -> None:
        vars(self).pop("large", None)

    @functools.cached_property
    def large(self) -> Outcome:
        return self.runner.run(self.rows, None)

    def differences(self) -> list[Difference] | None:
        """The largest difference of each array over all ways; None without finite gradients to compare with.

        Raises what the last way raised, where none could run.
        """
        finite = self._is_finite() if self.failed == "skip" else True
        if finite is None:
            return None
        self.compared = [*self._all_ways()] if finite else []
        found = worst(difference for one in self.compared for difference in one.differences)
        overflown = not finite or any(d.part == "gradient" and math.isinf(d.error) for d in found)
        if (overflown and self.runner.lower_scale()) or (finite and self.runner.replace_noise()):
            self.restart()
            return self.differences()
        if finite and not found:
            assert self.error is not None
            raise self.error
        return found or None

    def _is_finite(self) -> bool | None:
        """Whether the gradients of the rows at once are finite; None where there is nothing to compare with."""
        gradients = [gradient for gradient in self.large.gradients.values() if gradient is not None]
        if not gradients or not self.runner.is_finite([*self.large.losses.values()]):
            return None
        return self.runner.is_finite(gradients)

    def _all_ways(self) -> Iterator[Compared]:
        large = self.large
        for order, sizes in self.ways:
            try:
                micro_batches = self.runner.run(order, sizes)
            except Exception as error:
                if self.failed == "raise" or self.runner.is_out_of_memory(error):
                    raise
                self.error = error
                if self.failed == "differs":
                    yield Compared((order, sizes), [Difference("loss", math.inf, "loss")], {})
                continue
            yield Compared((order, sizes), *_compared(self.runner, micro_batches, large))

    def beyond_rounding(self, differences: Iterable[Difference]) -> list[Difference]:
        """Those that rounding doesn't make: where large terms cancel each other, it makes much of the difference."""
        wrong = [difference for difference in differences if not difference.error <= self.runner.tolerance]
        if not wrong:
            return wrong
        times, moved = TIMES_IN_HALF if self.runner.in_half else TIMES, self.moved()
        keys = [(d.part, d.name) for d in wrong]
        rounded = {k for k in keys if all(c.distances.get(k, 0.0) <= times * moved.get(k, 0.0) for c in self.compared)}
        return [difference for difference, key in zip(wrong, keys) if key not in rounded]

    def moved(self) -> dict[Key, float]:
        """How far each array moves with the last bits of the parameters; what isn't finite then is left out."""
        moved: dict[Key, float] = {}
        for outcome in self.runner.nearby(self.rows):
            for key, distance in _compared(self.runner, outcome, self.large)[1].items():
                if math.isfinite(distance):
                    moved[key] = max(moved.get(key, 0.0), distance)
        return moved

    def unrepeatable(self) -> list[Difference]:
        """How far the rows at once are from themselves when they run once more."""
        return differences_between(self.runner, self.runner.run(self.rows, None), self.large)


def _compared(runner: Runner, actual: Outcome, expected: Outcome) -> tuple[list[Difference], dict[Key, float]]:
    """How far each array is from the expected one, as relative errors and as distances.

    Losses and buffers that either lacks are infinitely far. A gradient that is zero but for rounding is measured by the
    largest one.
    """
    theirs, ours = dict(actual.parts()), dict(expected.parts())
    absent = [key for key in ours if key not in theirs and key[0] != "gradient"]
    absent += [key for key in theirs if key not in ours and key[0] == "loss"]
    pairs = {key: (theirs.get(key), array) for key, array in ours.items() if key not in absent}
    pairs = {key: pair for key, pair in pairs.items() if pair[0] is not None or pair[1] is not None}
    measured = dict(zip(pairs, runner.measure(list(pairs.values())), strict=True))
    measured |= dict.fromkeys(absent, Measured(math.inf, 1.0, 1))
    largest = max((one.scale for (part, _), one in measured.items() if part == "gradient"), default=0.0)
    found = []
    for (part, name), one in measured.items():
        if part == "buffer" and not (one.distance or one.scale):  # a buffer of zeros, or a move that isn't one
            continue
        floor = max(expected.floors.get(name, 0.0), SMALL * largest if part == "gradient" else 0.0)
        found.append(Difference(name, one.error(floor), part, one.entries if part != "loss" else 1))
    return found, {key: one.distance for key, one in measured.items()}


def differences_between(runner: Runner, actual: Outcome, expected: Outcome) -> list[Difference]:
    return _compared(runner, actual, expected)[0]


def worst(differences: Iterable[Difference]) -> list[Difference]:
    """Each array's largest difference among these."""
    found: dict[Key, Difference] = {}
    for difference in differences:
        known = found.get(key := (difference.part, difference.name))
        if known is None or not difference.error <= known.error:
            found[key] = difference
    return list(found.values())


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

    The rows are cut in one way, into three parts, and at the next proof in the other one.

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
        return min(rows, ENOUGH), self._repetitions % 2


def informative_rows(scores: Sequence[float], columns: Iterable[Callable[[], Sequence[float]]], most: int) -> list[int]:
    """Up to so many rows that contain what varies, sorted by their scores: the most padded ones first.

    Half of them are those with the lowest `scores`, half those with the highest. A column is a function that returns a
    number for each row; of each that varies, they contain two values at least.

    Example:
        >>> informative_rows([3, 1, 2, 9, 5], [lambda: [0, 0, 1, 0, 0]], 2)
        [1, 2]
    """
    order = sorted(range(len(scores)), key=lambda row: scores[row])
    if len(order) <= most:
        return order
    picked = [*order[: most // 2], *order[len(order) - (most - most // 2) :]]
    places = itertools.cycle(sorted(range(most), key=lambda place: abs(place - most // 2)))  # the middle ones first
    for column in columns:
        values = column()
        first = values[picked[0]]
        if all(values[row] == first for row in picked):
            other = next((row for row, value in enumerate(values) if value != first), None)
            if other is not None:
                picked[next(places)] = other
    return sorted(picked, key=lambda row: scores[row])


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


def interleaved_ways(units: Sequence[Sequence[int]]) -> list[Way]:
    """The two ways to cut sorted rows: the extremes apart, and mixed; parts of unequal sizes, of two units or more.

    The first way deals what follows the lowest third to two parts, so that neighbours are apart. Each of the `units`
    has the rows that belong together.

    Example:
        >>> interleaved_ways([[0], [1], [2], [3], [4], [5], [6], [7]])
        [([0, 1, 3, 6, 2, 4, 5, 7], [2, 2, 4]), ([0, 3, 6, 1, 4, 7, 2, 5], [4, 2, 2])]
    """
    count, order = len(units), list(range(len(units)))
    first, mixed = max(2, count // 3), [*order[::3], *order[1::3], *order[2::3]]
    if count < 4:
        plans = [(order, [1, count - 1]), (order[::-1], [1, count - 1])][: count - 1]
    elif count < 6:
        plans = [(order, [first, count - first]), (mixed, [count - 2, 2])]
    else:
        rest = order[first:]
        dealt = rest[1::3] if len(rest) > 5 else rest[1::2]
        others = [place for place in rest if place not in dealt]
        first_plan = [*order[:first], *dealt, *others], [first, len(dealt), len(others)]
        plans = [first_plan, (mixed, [count - first - 2, 2, first])]
    return _of_units(units, plans)


def ragged_ways(units: Sequence[Sequence[int]], random: Any) -> list[Way]:
    """Ways to cut rows for a check, drawn by a `random.Random`: ragged in order, ragged and shuffled, small pieces."""
    count, order = len(units), list(range(len(units)))
    shuffled = random.sample(order, count)
    plans = [(order, _ragged(count, 2, random)), (shuffled, _ragged(count, 3, random))]
    if count >= 8:
        plans.append((order, _ragged(count, min(count // 2, 7), random)))
    return _of_units(units, plans)


def _ragged(count: int, parts: int, random: Any) -> list[int]:
    """Random sizes, each of two or more where there are enough, not all the same where that is possible."""
    least = 2 if count >= 4 else 1
    parts = max(1, min(parts, count // least))
    sizes = [least] * parts
    for _ in range(count - least * parts):  # skewed towards the first parts, so that weights of all sizes occur
        sizes[random.choices(range(parts), [1 / (1 + part) for part in range(parts)])[0]] += 1
    if parts > 1 and len(set(sizes)) == 1 and sizes[-1] > least:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes


def _of_units(units: Sequence[Sequence[int]], plans: Sequence[tuple[list[int], list[int]]]) -> list[Way]:
    ways: list[Way] = []
    for places, counts in plans:
        sizes = iter([len(units[place]) for place in places])
        rows = [row for place in places for row in units[place]]
        ways.append((rows, [sum(itertools.islice(sizes, count)) for count in counts]))
    return ways
