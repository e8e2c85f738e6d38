"""NumPy's part of proofs: which rows tell most, for all; how far arrays are from each other, for Keras and JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gradaccum.core.causes import Leaf
from gradaccum.core.proof import Measured, Runner
from gradaccum.core.rounding import last_place
from gradaccum.core.ways import informative_rows


class ArrayRunner(Runner):
    """A proof's runner whose outcomes are arrays of NumPy's, or what becomes one."""

    compiles = True

    def measure(self, pairs: Sequence[tuple[Any, Any]]) -> list[Measured]:
        return [_measured(actual, expected) for actual, expected in pairs]

    def is_finite(self, arrays: Sequence[Any]) -> bool:
        return all(bool(np.isfinite(array).all()) for array in arrays)

    def factors(self, seed: int, *, far: bool) -> Any:
        """A function of a shape: numbers beside 1 that move parameters by their last bits, or by half of their digits.

        They are drawn with this seed, for one parameter after the other.
        """
        random, unit = np.random.default_rng(seed), last_place(self.precision)
        least, most = (math.sqrt(unit) / 4, math.sqrt(unit)) if far else (unit, unit)
        return lambda shape: 1.0 + random.choice([-1.0, 1.0], shape) * random.uniform(least, most, shape)


def _measured(actual: Any, expected: Any) -> Measured:
    given = np.asarray(actual if expected is None else expected)
    ours, theirs = (np.zeros(given.shape) if one is None else _wide(one) for one in (actual, expected))
    finite = np.isfinite(theirs)
    if ours.shape != theirs.shape or not np.array_equal(np.isfinite(ours), finite):
        return Measured(math.inf, largest(theirs), int(theirs.size), bool(finite.all()))
    difference = np.where(finite, ours, 0) - np.where(finite, theirs, 0)
    return Measured(largest(difference), largest(theirs), int(theirs.size), bool(finite.all()))


def _wide(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array if array.dtype.kind == "c" else array.astype("float64")


def largest(array: Any) -> float:
    """`max|array|` over its finite numbers; 0 without any."""
    array = np.abs(np.asarray(array))
    return float(array[np.isfinite(array)].max(initial=0.0))


def relative_error(actual: Any, expected: Any, floor: float = 0.0) -> float:
    return _measured(actual, expected).error(floor)


# Which rows tell most.

FEW = 16
"""Floating-point numbers in a row up to which they may be targets and weights, and zeros among them count."""
CLASSES = 64
"""The most classes, or columns, whose rows are told apart."""


def rows_to_prove(arrays: Iterable[tuple[str, np.ndarray]], rows: int, most: int) -> list[int]:
    """Up to `most` of the rows that show what a loss may treat apart, sorted by how much in them counts.

    `arrays`: of each tensor of the batch its path, and its numbers with the rows in front.
    """
    counting, columns = np.zeros(rows), list[np.ndarray]()
    for some in _numbers(arrays):
        counting += some.counting()
        columns += [*some.columns(), *some.classes()]
    order = counting.argsort(kind="stable").tolist()
    ends, sorts = [order[0], int(counting.argmax())], list[tuple[int, list[int]]]()
    if columns:
        told = np.array(columns, dtype="float64")
        told = told[told.min(1) != told.max(1)]
        ends += np.stack([told.argmin(1), told.argmax(1)], 1).ravel().tolist()
        counts, places = np.count_nonzero(told, axis=1).tolist(), told.nonzero()[1]
        starts = itertools.accumulate(counts, initial=0)
        sorts = [(count, places[start : start + min(count, 3)].tolist()) for count, start in zip(counts, starts)]
    return informative_rows(order, sorts, ends, most)


def numbers_of_rows(arrays: Iterable[tuple[str, np.ndarray]]) -> list[list[float]]:
    """What a loss may divide by, such as how much of each row isn't zero: for `telling_order`. As `rows_to_prove`."""
    return [column.tolist() for some in _numbers(arrays) for column in some.columns()]


def _numbers(arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[_Numbers]:
    return (_Numbers(path, values) for path, values in arrays if values.dtype.kind in "biuf" and values.size)


class _Numbers:
    """The numbers of a tensor of the batch, and what there is to tell of each row."""

    def __init__(self, path: str, values: np.ndarray) -> None:
        self.path, self.values, self.flat = path, values, values.reshape(len(values), -1)
        self.in_row, self.is_float = self.flat.shape[1], values.dtype.kind == "f"
        self.least, self.most = self.flat.min(1), self.flat.max(1)
        self.lowest, self.highest = self.least.min().item(), self.most.max().item()

    def columns(self) -> list[np.ndarray]:
        """How much is missing, below zero, zero, or isn't; a class; the least or the most of each row."""
        flat, found = self.flat, list[np.ndarray]()
        if not math.isfinite(self.lowest) or not math.isfinite(self.highest):
            found.append((~np.isfinite(flat)).sum(1))
        for sign, may_be in ((np.less, not self.lowest >= 0), (np.equal, not self.lowest > 0)):
            if may_be:
                count = sign(flat, 0).sum(1)
                found += [count, self.in_row - count]
        named = "mask" in self.path or "weight" in self.path
        if self.in_row == 1 or (named and self.values.ndim <= 2):
            found.append(flat.sum(1, dtype="float64"))
        if named and self.values.ndim == 2:
            found.append(flat[:, 0] == 0)  # padding on the left
        if not self._is_whole():
            return [*found, self.least, self.most]
        if self.in_row == 1 and self.highest - self.lowest < CLASSES:
            return [*found, *(flat[:, 0] == np.arange(self.lowest, self.highest + 1)[:, None])]
        return [*found, self.least == self.lowest, self.most == self.highest]

    def classes(self) -> list[np.ndarray]:
        """Which rows have one of several numbers from each class: whole numbers, or columns that aren't zero."""
        if self.in_row == 1:
            return []
        last, ends, found = self.values.shape[-1], (self.lowest, self.highest), list[np.ndarray]()
        may_be_columns = self.values.dtype.kind in "bf" or ends == (0, 1)
        if 1 < last <= CLASSES and may_be_columns and not self.lowest > 0:
            found += [*(self.values != 0).reshape(len(self.values), -1, last).any(1).T]
        if self.highest - self.lowest < CLASSES and self._is_whole():
            found += [(self.flat == number).any(1) for number in range(int(self.lowest), int(self.highest) + 1)]
        return found

    def counting(self) -> Any:
        """How much counts, of targets, weights, a mask or ids."""
        if self.is_float:  # a mask or weights: a mean shows where a part has more
            return (2 if self.in_row == 1 else 1) * (self.flat != 0).sum(1) if self.in_row <= FEW else 0.0
        if self.in_row > 1:
            return ((self.flat != 0) & (self.flat != -100)).sum(1)
        values = self.flat[:, 0].astype("float64")
        return 2 * (values >= 0) + values / (1.0 + np.abs(values).max())

    def _is_whole(self) -> bool:
        if not self.is_float:
            return True
        whole_ends = self.lowest.is_integer() and self.highest.is_integer()
        return whole_ends and bool((self.flat == np.floor(self.flat)).all())


def leaf_of(name: str, code: str, values: np.ndarray) -> Leaf:
    """What the search for causes has to know of a tensor of the batch, with its rows in front."""
    kind = {"b": "bool", "i": "whole", "u": "whole"}.get(values.dtype.kind, "float")
    return Leaf(
        name,
        code,
        lambda rows: values[np.asarray(rows)],
        kind,  # type: ignore[arg-type]  # one of these
        values.ndim,
        frozenset(np.unique(values).tolist()) if kind == "whole" else None,
        kind == "float" and not (values >= 0).all(),
    )
