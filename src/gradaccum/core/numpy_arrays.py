"""How far NumPy arrays are from each other: the arithmetic of a proof for Keras and JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradaccum.core.causes import Leaf
from gradaccum.core.proof import Measured, Runner, last_place


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


def numbers_of_rows(arrays: Iterable[np.ndarray]) -> list[list[float]]:
    """What a loss may divide by, such as how much of each row isn't zero: for `telling_order`. Rows are in front."""
    found = list[np.ndarray]()
    for array in arrays:
        flat = array.reshape(len(array), -1)
        if flat.dtype.kind not in "biuf" or not flat.size:
            continue
        found += [signs.sum(1) for signs in (flat == 0, flat != 0, flat < 0, flat >= 0)]
        if flat.shape[1] == 1:
            values = np.unique(flat)
            found += [flat[:, 0], *((flat == value)[:, 0] for value in values if 2 < len(values) < len(flat))]
    return [column.tolist() for column in found]


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
