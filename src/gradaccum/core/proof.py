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
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from gradaccum.core.equivalence import Cause, Difference, Equivalence, Part, limits_of
from gradaccum.core.rounding import last_place, rounding
from gradaccum.core.ways import Way

Array = Any
"""An array of some framework. None stands for a gradient that never arrived, which is zero."""
Key = tuple[Part, str]
Result = TypeVar("Result")

SMALL = 1e-3
"""A gradient that is smaller than the largest one by this factor is measured by that one: all of it may be rounding."""
NEARBY, ELSEWHERE = 16, 2
"""How often parameters are moved by their last bits; and by half of their digits."""
TIMES, TIMES_IN_HALF = 32, 2
"""A difference is rounding up to so many times what moving the last bits of the parameters makes of the result."""


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
        self.unrepeated: list[Difference] = []  # how far the rows at once are from themselves, if it is what differs
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
        """The same; of what rounding makes at these parameters, the error is that at others nearby.

        Of rows that can't be repeated nothing is rounding.
        """
        if self.differences() is None:
            return None
        wrong = {(one.part, one.name) for one in self.wrong}
        again = self.unrepeatable() if wrong else []
        self.unrepeated = [one for one in again if one.part != "buffer" and not one.error <= self.runner.tolerance]
        if self.unrepeated:
            return self.found
        excused, beside = dict[Key, float](), dict.fromkeys(wrong, 0.0)
        for seed in range(ELSEWHERE if wrong else 0):
            equal, rounded = dict[Key, float](), dict[Key, float]()
            with contextlib.suppress(Exception), self.runner.moved(seed, far=True) as there:
                other = Comparison(there, self.ways, self.failed)
                equal, rounded = other._of_rounding(wrong - excused.keys(), beside.keys())
            excused |= equal  # where it is equal once, it hangs on these parameters; large terms cancel at all of them
            beside = rounded
        drifting = self._drifting(again, beside)
        excused = {key: error for key, error in beside.items() if key not in drifting} | excused
        self.compared = [
            one._replace(gaps={k: g._replace(error=excused.get(k, g.error)) for k, g in one.gaps.items()})
            for one in self.compared
        ]
        self.found = worst(self.compared)
        return self.found

    def _drifting(self, before: Sequence[Difference], keys: Iterable[Key]) -> set[Key]:
        """Those that move further away with each run, as state does that runs leave behind: rounding doesn't."""
        if not (keys := {*keys}):
            return set()
        least, errors = last_place(self.runner.precision), {(one.part, one.name): one.error for one in before}
        later = {(one.part, one.name): one.error for one in self.unrepeatable()}
        return {key for key in keys & later.keys() if later[key] > 4 * max(errors.get(key, 0.0), least)}

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
