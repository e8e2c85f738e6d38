"""What sorts of rows a batch holds, and which few of them show that: missing labels, padding, classes, weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.keras.backends.rows import has_rows, rows_of, unpack

__all__ = ["Sorts", "dealt", "few_rows"]

LOOKED_THROUGH = 4096
"""Rows among which the few that are proved are chosen."""
VALUES = 64
"""The most whole numbers, and classes in columns, of an array that are told apart."""
MOST_NUMBERS = 2**20
"""The most numbers of an array that are looked at one by one: of targets every n-th, of larger inputs none."""
GROWTH = 0.1
"""How much wider than before, relatively, a range must be that has grown often."""


@dataclass
class Sorts:
    """What sorts of rows a batch holds, as far as its numbers tell; and those of all batches that were joined.

    A loss may treat missing labels, padding, a class, uneven weights or large values apart. What it does with them can
    only be proved on rows that show them.

    Attributes:
        rows: How many there are.
        marks: Of each array, by its place: what occurs in it. `"nan"`, `"inf"`, `"negative"`, `"zero"`, and in targets
            and weights `"uneven"`, `("value", 3)` for whole numbers and `("column", 3)` for entries that aren't zero.
        ranges: Of each array of targets and weights: its smallest and largest number.
        joined: How many batches these are.
    """

    rows: int = 0
    marks: dict[int, set[Hashable]] = field(default_factory=dict)
    ranges: dict[int, tuple[float, float]] = field(default_factory=dict)
    joined: int = 0

    @classmethod
    def of(cls, data: Any, rows: Iterable[int] | None = None) -> Sorts:
        """Those of a batch, or of a few rows of it."""
        found, of = cls(joined=1), None if rows is None else np.fromiter(rows, int)
        for place, closely, numbers in _arrays(data):
            numbers = numbers if of is None else numbers[of]
            found.rows = max(found.rows, len(numbers))
            found.marks[place] = _marks(numbers, closely)
            finite = numbers[np.isfinite(numbers)]
            if closely and finite.size:
                found.ranges[place] = float(finite.min()), float(finite.max())
        return found

    def new_in(self, batch: Sorts, most_rows: int) -> list[tuple[int, Hashable]]:
        """What a batch shows that these don't: `(place, mark)`."""
        new: list[tuple[int, Hashable]] = []
        if min(batch.rows, most_rows) > self.rows:
            new.append((-1, "rows"))
        for place, marks in batch.marks.items():
            known = self.marks.get(place, set())
            new += [(place, mark) for mark in sorted(marks - known, key=str) if _counts(mark, known)]
        for place, (low, high) in batch.ranges.items():
            lowest, highest = self.ranges.get(place, (np.inf, -np.inf))
            # A target that grows with time would be proved with every batch.
            margin = GROWTH * (highest - lowest) if self.joined > VALUES else 0.0
            new += [(place, "low")] if low < lowest - margin else []
            new += [(place, "high")] if high > highest + margin else []
        return new

    def join(self, batch: Sorts, shown: Sorts) -> None:
        """Add those of a batch; of values and columns, only those which few rows of it have shown."""
        self.rows, self.joined = max(self.rows, batch.rows), self.joined + 1
        for place, marks in batch.marks.items():
            known = self.marks.setdefault(place, set())
            known |= {mark for mark in marks if not isinstance(mark, tuple)} | shown.marks.get(place, set())
        for place, (low, high) in batch.ranges.items():
            lowest, highest = self.ranges.get(place, (np.inf, -np.inf))
            self.ranges[place] = min(low, lowest), max(high, highest)


def _marks(numbers: np.ndarray, closely: bool) -> set[Hashable]:
    """What occurs in an array; in targets and weights also which whole numbers, and which columns that aren't zero."""
    finite = numbers[np.isfinite(numbers)]
    marks: set[Hashable] = set()
    if len(finite) < numbers.size:
        marks |= {name for name, test in (("nan", np.isnan), ("inf", np.isinf)) if test(numbers).any()}
    if not finite.size:
        return marks
    marks |= {"negative"} if finite.min() < 0 else set()
    marks |= set() if finite.all() else {"zero"}
    if closely:
        marks |= {"uneven"} if finite.min() != finite.max() else set()
        marks.update(("value", value) for value in _whole(finite))
        if numbers.ndim > 1 and 1 < numbers.shape[-1] <= VALUES and numbers.size <= MOST_NUMBERS:
            columns = (numbers != 0).any(axis=tuple(range(numbers.ndim - 1)))
            marks.update(("column", int(column)) for column in np.flatnonzero(columns))
    return marks


def _counts(mark: Hashable, known: set[Hashable]) -> bool:
    """Whether a mark is one to be told apart: of very many values none is."""
    return not isinstance(mark, tuple) or sum(isinstance(one, tuple) and one[0] == mark[0] for one in known) < VALUES


def _whole(numbers: np.ndarray) -> list[int]:
    """The whole numbers in these, unless there are very many."""
    numbers = numbers[:: -(-numbers.size // MOST_NUMBERS)]
    if numbers.dtype.kind == "f":
        numbers = numbers[numbers == np.floor(numbers)]
        numbers = numbers[np.abs(numbers) < 2**31].astype("int64")
    if not numbers.size:
        return []
    low, high = int(numbers.min()), int(numbers.max())
    if high - low < 16 * VALUES:
        values = np.flatnonzero(np.bincount(numbers.astype("int64") - low)) + low
    else:
        values = np.unique(numbers[: 256 * VALUES])
    return values.tolist() if len(values) <= VALUES else []


def _arrays(data: Any) -> Iterator[tuple[int, bool, np.ndarray]]:
    """`(place, whether it holds targets or weights, numbers)` of the arrays that can be looked at."""
    x, y, sample_weight = unpack(data)
    inputs = len(tree.flatten(x))
    for place, leaf in enumerate(tree.flatten((x, y, sample_weight))):
        if not has_rows(leaf):
            continue
        closely = place >= inputs
        dtype = keras.backend.standardize_dtype(leaf.dtype) if hasattr(leaf, "dtype") else ""
        if not closely and "float" in dtype and np.prod(leaf.shape, dtype="float64") > MOST_NUMBERS:
            continue
        numbers = _numbers(leaf)
        if numbers is not None:
            yield place, closely, numbers


def _numbers(leaf: Any) -> np.ndarray | None:
    try:
        if getattr(leaf, "nse", None) is not None:  # a sparse array of JAX's
            return None
        numbers = np.asarray(ops.convert_to_numpy(leaf))
        if numbers.dtype.kind not in "iuf":
            numbers = numbers.astype("uint8" if numbers.dtype.kind == "b" else "float32")
    except Exception:  # sparse, ragged, strings
        return None
    return numbers


def few_rows(data: Any, count: int, new: Iterable[tuple[int, Hashable]] = ()) -> np.ndarray:
    """Which rows to look at: those that show something new, then the extremes of what can be told of a row.

    Rows with missing labels, padding or weights of zero are rare, and what they do shows where one part has more of
    them than the other.
    """
    x, y, sample_weight = unpack(data)
    rows = rows_of(data)
    assert rows is not None
    chosen: list[int] = []
    for row in _showing(data, list(new)):
        if row not in chosen and len(chosen) < max(1, 3 * count // 4):
            chosen.append(row)
    features: list[np.ndarray] = []
    for leaf in tree.flatten((y, sample_weight, x)):
        if has_rows(leaf):
            features += _features(leaf)
    limit = min(rows, LOOKED_THROUGH)
    extremes = len(chosen) + max((count + 1) // 2 - len(chosen), (count - len(chosen)) // 2)
    for feature in features:
        for row in (int(np.argmin(feature)), int(np.argmax(feature))):
            if row not in chosen and len(chosen) < extremes:
                chosen.append(row)
    for row in [*np.linspace(0, limit - 1, count).astype(int).tolist(), *range(limit)]:
        if row not in chosen and len(chosen) < count:
            chosen.append(row)
    known = [row for row in chosen if row < limit]
    order = np.lexsort([feature[known] for feature in reversed(features)]) if features else np.argsort(known)
    return np.array([*np.array(known)[order].tolist(), *(row for row in chosen if row >= limit)])


def dealt(rows: np.ndarray, sizes: list[int]) -> np.ndarray:
    """The rows in another order, in which parts of these sizes share what lay side by side, and share it unevenly.

    Of two rows of a class, two parts have one each: a class may be counted, or averaged, by itself. And no three parts
    have the same number of them, for then the mean of their means would be that of the whole.

    Example:
        >>> dealt(np.arange(8), [3, 3, 2]).tolist()
        [0, 2, 4, 1, 3, 6, 5, 7]
    """
    parts: list[list[int]] = [[] for _ in sizes]
    turns: list[int] = []
    for first in range(0, len(sizes) - 3 if len(sizes) % 2 else len(sizes), 2):
        turns += [first, first + 1] * max(sizes[first : first + 2])
    if len(sizes) % 2:
        a, b, c = range(len(sizes) - 3, len(sizes)) if len(sizes) > 1 else (0, 0, 0)
        both = (sizes[a] + sizes[b] - sizes[c]) // 2
        turns += [a, b] * both + [a, c] * (sizes[a] - both) + [b, c] * max(sizes)
    queue = iter(rows.tolist())
    for part in turns:
        if len(parts[part]) < sizes[part]:
            parts[part].append(next(queue))
    return np.array([row for part in parts for row in part])


def _showing(data: Any, new: list[tuple[int, Hashable]]) -> Iterator[int]:
    """Two rows for each of these, where there are."""
    for place, _, numbers in _arrays(data) if new else ():
        numbers = numbers.reshape(len(numbers), -1, numbers.shape[-1] if numbers.ndim > 1 else 1)
        for mark in [mark for where, mark in new if where == place]:
            shows = _shows(mark, numbers)
            rows = [] if shows is None else np.flatnonzero(shows.reshape(len(numbers), -1).any(1)).tolist()
            yield from rows[:2]


def _shows(mark: Hashable, numbers: np.ndarray) -> Any:
    """Where numbers `(rows, ..., columns)` show this."""
    if isinstance(mark, tuple):
        return numbers == mark[1] if mark[0] == "value" else numbers[..., mark[1]] != 0
    if mark == "nan":
        return np.isnan(numbers)
    if mark == "inf":
        return np.isinf(numbers)
    if mark == "negative":
        return numbers < 0
    if mark == "zero":
        return numbers == 0
    if mark in ("low", "high") and not np.isnan(numbers).all():
        return numbers == (np.nanmin(numbers) if mark == "low" else np.nanmax(numbers))
    return None


def _features(leaf: Any) -> list[np.ndarray]:
    """Of each row: missing numbers, negative ones, zeros, the largest and its place, and the mean."""
    numbers = _numbers(leaf) if hasattr(leaf, "dtype") else None
    if numbers is None:
        return []
    numbers = numbers[:LOOKED_THROUGH]
    numbers = numbers.reshape(len(numbers), -1)[:, :LOOKED_THROUGH].astype("float64")
    if not numbers.shape[1]:
        return []
    known = np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    found = [np.isnan(numbers).sum(1), (numbers < 0).sum(1), (numbers == 0).sum(1)]
    found += [known.max(1), known.argmax(1), known.mean(1)]
    return [np.asarray(feature, "float64") for feature in found if len(np.unique(feature)) > 1]
