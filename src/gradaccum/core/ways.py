"""Which rows a proof or a check looks at, and the ways to cut these into micro-batches. Numbers alone, no tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from random import Random

from gradaccum.core.sizes import even_sizes

Way = tuple[Sequence[int], Sequence[int]]
"""A way to cut rows: their order, and the sizes of the micro-batches in it."""

GROUPS = 3
"""Groups of rows of a proof, at least."""
DRAWN, ALIKE = 32, 0.02
"""Orders of rows that are drawn at most; and shares of a weight up to which two are alike."""


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
