"""NumPy's part of proofs: which rows tell most, for all; how far arrays are from each other, for Keras and JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradaccum.core.causes import Leaf
from gradaccum.core.proof import Measured, Runner, informative_rows, last_place


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
    for path, values in arrays:
        flat = values.reshape(rows, -1)
        if flat.dtype.kind not in "biuf" or not flat.size:
            continue
        counting += _counting(flat)
        columns += _columns(path, values.ndim, flat)
        columns += _classes(values, flat)
    order = counting.argsort(kind="stable").tolist()
    ends, sorts = [order[0], int(counting.argmax())], list[tuple[int, list[int]]]()
    if columns:
        told = np.array(columns, dtype="float64")
        told = told[told.min(1) != told.max(1)]
        ends += np.stack([told.argmin(1), told.argmax(1)], 1).ravel().tolist()
        sorts = [(len(places), places[:3].tolist()) for places in map(np.flatnonzero, told)]
    return informative_rows(order, sorts, ends, most)


def numbers_of_rows(arrays: Iterable[tuple[str, np.ndarray]]) -> list[list[float]]:
    """What a loss may divide by, such as how much of each row isn't zero: for `telling_order`. As `rows_to_prove`."""
    found = list[np.ndarray]()
    for path, values in arrays:
        flat = values.reshape(len(values), -1)
        if flat.dtype.kind in "biuf" and flat.size:
            found += _columns(path, values.ndim, flat)
    return [column.tolist() for column in found]


def _columns(path: str, dims: int, flat: np.ndarray) -> list[np.ndarray]:
    """Numbers of each row: how much is missing, below zero, zero, or isn't; a class; the least or the most of it."""
    least, most, numbers = flat.min(1), flat.max(1), flat.shape[1]
    lowest, highest = _ends(flat)
    found = list[np.ndarray]()
    if not math.isfinite(lowest) or not math.isfinite(highest):
        found.append((~np.isfinite(flat)).sum(1))
    for sign, may_be in ((np.less, not lowest >= 0), (np.equal, not lowest > 0)):
        if may_be:
            count = sign(flat, 0).sum(1)
            found += [count, numbers - count]
    named = "mask" in path or "weight" in path
    if numbers == 1 or (named and dims <= 2):
        found.append(flat.sum(1, dtype="float64"))
    if named and dims == 2:
        found.append(flat[:, 0] == 0)  # padding on the left
    if not _is_whole(flat, lowest, highest):
        return [*found, least, most]
    if numbers == 1 and highest - lowest < CLASSES:
        return [*found, *(flat[:, 0] == np.arange(lowest, highest + 1)[:, None])]
    return [*found, least == lowest, most == highest]


def _counting(flat: np.ndarray) -> Any:
    """How much counts in each row of a tensor of targets, weights, a mask or ids."""
    numbers = flat.shape[1]
    if flat.dtype.kind == "f":  # a mask or weights: a mean shows where a part has more
        return (2 if numbers == 1 else 1) * (flat != 0).sum(1) if numbers <= FEW else 0.0
    if numbers > 1:
        return ((flat != 0) & (flat != -100)).sum(1)
    values = flat[:, 0].astype("float64")
    return 2 * (values >= 0) + values / (1.0 + np.abs(values).max())


def _classes(values: np.ndarray, flat: np.ndarray) -> list[np.ndarray]:
    """Which rows have one of several numbers from each class: whole numbers, or columns that aren't zero."""
    last, (lowest, highest) = values.shape[-1], _ends(flat)
    if flat.shape[1] == 1:
        return []
    columns = 1 < last <= CLASSES and (flat.dtype.kind in "bf" or (lowest, highest) == (0, 1))
    found = [*(values != 0).reshape(len(values), -1, last).any(1).T] if columns and not lowest > 0 else []
    if highest - lowest < CLASSES and _is_whole(flat, lowest, highest):
        found += [(flat == number).any(1) for number in range(int(lowest), int(highest) + 1)]
    return found


def _is_whole(flat: np.ndarray, lowest: float, highest: float) -> bool:
    if flat.dtype.kind != "f":
        return True
    return lowest.is_integer() and highest.is_integer() and bool((flat == np.floor(flat)).all())


def _ends(flat: np.ndarray) -> tuple[float, float]:
    return flat.min().item(), flat.max().item()


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
