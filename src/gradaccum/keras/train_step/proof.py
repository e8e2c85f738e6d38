"""The proof of the first update: a few rows of the batch, whole and in micro-batches, through the step itself.

And what sorts of rows a batch holds, and which few of them show that: missing labels, padding, classes, weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.equivalence import Difference, Equivalence
from gradaccum.core.proof import Comparison
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import private
from gradaccum.keras.backends.base import has_rows, rows_of, unpack
from gradaccum.keras.equivalence import StepRunner, find_causes, precision_of, take_rows

__all__ = ["Proof", "Sorts", "few_rows", "ragged_size"]

ROWS = 16
"""Rows of the batch that are looked at, at most."""
ROWS_OF_AUTO = 8
"""The same where nobody has said how many fit into memory."""
WATCHED = 4096
"""The most numbers of a variable that is watched from one `fit` to the next."""
LOOKED_THROUGH = 4096
"""Rows among which the few that are proved are chosen."""
VALUES = 64
"""The most whole numbers, and classes in columns, of an array that are told apart."""
MOST_NUMBERS = 2**20
"""The most numbers of an array that are looked at one by one: of targets every n-th, of larger inputs none."""
GROWTH = 0.1
"""How much wider than before, relatively, a range must be that has grown often."""
SIGNS: dict[Hashable, Any] = {"nan": np.isnan, "inf": np.isinf, "negative": lambda n: n < 0, "zero": lambda n: n == 0}
"""What occurs in numbers."""


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
        new: list[tuple[int, Hashable]] = [(-1, "rows")] if min(batch.rows, most_rows) > self.rows else []
        for place, marks in batch.marks.items():
            known = self.marks.get(place, set())
            for mark in sorted(marks - known, key=str):  # of very many values none is told from others
                if not isinstance(mark, tuple) or sum(isinstance(k, tuple) and k[0] == mark[0] for k in known) < VALUES:
                    new.append((place, mark))
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
            simple = {mark for mark in marks if not isinstance(mark, tuple)}
            self.marks.setdefault(place, set()).update(simple, shown.marks.get(place, ()))
        for place, (low, high) in batch.ranges.items():
            lowest, highest = self.ranges.get(place, (np.inf, -np.inf))
            self.ranges[place] = min(low, lowest), max(high, highest)


@dataclass
class _Proven:
    """What is known of batches of a kind: the sorts of rows that were proved, and the variables read, with values."""

    sorts: Sorts = field(default_factory=Sorts)
    watched: list[tuple[Any, np.ndarray]] = field(default_factory=list)


class Proof:
    """Compares what a few rows of a batch give whole and in ragged micro-batches.

    Loss, gradients and moved variables are computed by the step that then makes the updates, with random numbers held
    and BatchNormalization frozen, which has a warning of its own. That happens at updates 1, 2, 4, 8, ... since the
    model was compiled, with the first batch of each `fit`, with batches of another kind for `train_on_batch`, and in an
    epoch's first update if a variable has changed that the loss reads and no optimizer trains. All other updates make
    no call of this.

    Differences above what rounding makes of the compared dtype are told from an ill-conditioned model's rounding: they
    must be larger than what moving the weights by one unit in the last place changes.
    """

    def __init__(self, step: Any) -> None:
        self.step = step
        self._updates = 0
        self._wanted = self._epoch_begun = self._on_batch = self._scheduled = self._warned = False
        self._compiled: Any = None
        self._proven: dict[str, _Proven] = {}
        self._doubt = ""

    def restart(self) -> None:
        """The training function is made anew."""
        self._updates = 0

    def begin_fit(self) -> None:
        """A `fit` begins: its first batch is proved."""
        self._wanted = True

    def begin_epoch(self) -> None:
        """An epoch or `train_on_batch` begins: in an epoch, variables may have changed."""
        self._epoch_begun, self._on_batch = not self._on_batch, False

    def see(self, data: Any) -> None:
        """This batch comes next, by itself."""
        self._on_batch = True
        self._wanted = self._wanted or self._kind(data) not in self._proven

    def is_due(self, updates: int) -> bool:
        """Whether one of the next updates, so many, is to be proved."""
        before, self._updates = self._updates, self._updates + updates
        self._scheduled = before == 0 or before.bit_length() != self._updates.bit_length()
        return self._wanted or self._epoch_begun or self._scheduled

    def run(self, data: Any, state: Any = None) -> None:
        """Prove the update of this batch, which is due."""
        rows = rows_of(data)
        if rows is None or rows < 2:
            return
        compiled = private.compiled_losses(self.step.model)
        if compiled is not self._compiled:
            self._compiled = compiled
            self._proven.clear()
        known = self._proven.get(self._kind(data))
        wanted = self._wanted or self._scheduled or known is None
        self._wanted = self._epoch_begun = False
        proven = known or _Proven()
        if not wanted and all(np.array_equal(self._value(v, state), old, equal_nan=True) for v, old in proven.watched):
            return
        sorts = Sorts.of(data)
        reads: dict[int, Any] = {}
        order, reason = self._compare(data, state, rows, proven.sorts.new_in(sorts, ROWS), reads)
        self._proven[self._kind(data)] = proven
        proven.sorts.join(sorts, Sorts.of(data, order))
        # A function that is compiled reads variables while it is traced, and not again.
        watched = [*self._watched(reads)] or [variable for variable, _ in proven.watched]
        proven.watched = [(variable, self._value(variable, state)) for variable in watched]
        if reason is not None:
            self._doubt = f"{type(reason).__name__}: {reason}".splitlines()[0]

    def warn(self) -> None:
        """Warn, once, of an update that has been made although it could not be proved."""
        if self._doubt and not self._warned:
            self._warned = True
            warnings.warn(
                "micro_batched compares the first update on a few rows of its batch, whole and in micro-batches, which "
                f"could not be done here ({self._doubt}). So it isn't known whether updates are the large batch's: "
                "gradaccum.keras.check_equivalence tells. micro_batched(..., verify=False) leaves the comparison out.",
                stacklevel=2,
            )
        self._doubt = ""

    def _compare(
        self, data: Any, state: Any, rows: int, new: Any, reads: dict[int, Any]
    ) -> tuple[np.ndarray, Exception | None]:
        """Compare as many rows as can be, and judge. Returns which rows, and why nothing is known, if so.

        What the rows at once read is added to `reads`.
        """
        reason: Exception | None = None
        order = np.arange(0)
        allowed = rounding(precision_of(self.step.model)) / 10
        for few, size in _attempts(rows, self.step.micro_batch_size):
            sizes = even_sizes(few, size)
            order = dealt(few_rows(data, few, new), sizes)
            batch = take_rows(data, order)
            runner = StepRunner(self.step, batch, "frozen", allowed, state)
            runner.reads = reads
            comparison = Comparison(runner, range(few), [(range(few), sizes)], "raise")
            try:
                loss = comparison.large.losses["loss"]
                if not np.isfinite(loss).all():
                    return order, reason or ValueError(f"the loss of {few} rows at once is {loss}")
                differences = comparison.differences() or []
            except NotEquivalentError:
                raise
            except Exception as error:
                reason = reason or error
                continue
            self._judge(batch, comparison, differences, state)
            return order, None
        return order, reason

    def _judge(self, batch: Any, comparison: Comparison, differences: Sequence[Difference], state: Any) -> None:
        runner: Any = comparison.runner
        allowed, model = runner.tolerance, self.step.model
        if all(difference.error <= allowed for difference in differences):
            return
        again = [d for d in comparison.unrepeatable() if d.part != "buffer"]
        if runner.draws.raw or any(not difference.error <= allowed for difference in again):
            self._doubt = "it draws random numbers that don't come from keras.random, and can't be held"
            return
        wrong = comparison.beyond_rounding(differences)
        if not wrong:
            return
        rows, [(_, sizes)] = len(comparison.rows), comparison.ways
        cuts = np.split(np.arange(rows), np.cumsum(sizes)[:-1])
        values = self.step.state() if state is None else state
        causes = find_causes(model, (values[0], values[1], values[3]), unpack(batch), cuts, wrong, allowed, "frozen")
        try:
            Equivalence(tuple(wrong), allowed, tuple(causes), rows=rows).raise_if_different()
        except NotEquivalentError as error:
            raise NotEquivalentError(
                f"{error}\nThat is of {rows} rows of the batch, whole and in micro-batches of "
                f"{', '.join(map(str, sizes))}; nothing has been trained with it. micro_batched(..., verify=False) "
                "trains all the same."
            ) from None

    def _kind(self, batch: Any) -> str:
        def kind(leaf: Any) -> Any:
            if leaf is None or not hasattr(leaf, "shape"):
                return None
            return len(leaf.shape), keras.backend.standardize_dtype(leaf.dtype)

        return str((len(self.step.model.trainable_variables), tree.map_structure(kind, unpack(batch))))

    def _watched(self, reads: dict[int, Any]) -> Iterator[Any]:
        """Of the variables that were read, those whose change means something."""
        trained, _, optimizer, metrics = self.step.variables()
        moving = [v for layer in self.step.batch_norms for v in layer.variables]
        others = {id(variable) for variable in (*trained, *optimizer, *metrics, *moving)}
        for variable in reads.values():
            seed = "seed_generator_state" in (variable.path or "")
            if not seed and id(variable) not in others and math.prod(variable.shape) <= WATCHED:
                yield variable

    def _value(self, variable: Any, state: Any) -> np.ndarray:
        for variables, values in zip(self.step.variables(), state or ()):
            for one, value in zip(variables, values):
                if one is variable:
                    return np.array(ops.convert_to_numpy(value))
        return np.array(ops.convert_to_numpy(variable.value))


def _attempts(rows: int, micro_batch_size: Any) -> Iterator[tuple[int, int]]:
    """`(rows, size of micro-batches)` to compare, until one can be: ragged, then even, of fewer and fewer rows."""
    auto = micro_batch_size == "auto"
    most = min(rows, ROWS_OF_AUTO if auto else max(2, min(ROWS, 2 * micro_batch_size)))
    if ragged_size(most) is None and most > 2:
        most -= 1
    yield most, ragged_size(most) or 1
    while most >= 2:
        most -= most % 2
        yield most, most // 2
        if not auto and 1 < micro_batch_size < most // 2:
            yield most // micro_batch_size * micro_batch_size, micro_batch_size
        most //= 2


def ragged_size(rows: int) -> int | None:
    """The largest micro-batch size that doesn't divide so many rows evenly; one that makes three parts, if possible."""
    counts = {size: -(-rows // size) for size in range(rows - 1, 0, -1)}
    ragged = [size for size, count in counts.items() if rows % count]
    return next((size for size in ragged if counts[size] > 2), ragged[0] if ragged else None)


# Which rows.


def _marks(numbers: np.ndarray, closely: bool) -> set[Hashable]:
    """What occurs in an array; in targets and weights also which whole numbers, and which columns that aren't zero."""
    finite = numbers[np.isfinite(numbers)]
    marks: set[Hashable] = {name for name, test in SIGNS.items() if test(numbers).any()}
    if not finite.size:
        return marks
    if closely:
        marks |= {"uneven"} if finite.min() != finite.max() else set()
        marks.update(("value", value) for value in _whole(finite))
        if numbers.ndim > 1 and 1 < numbers.shape[-1] <= VALUES and numbers.size <= MOST_NUMBERS:
            columns = (numbers != 0).any(axis=tuple(range(numbers.ndim - 1)))
            marks.update(("column", int(column)) for column in np.flatnonzero(columns))
    return marks


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
        dtype = keras.backend.standardize_dtype(leaf.dtype) if hasattr(leaf, "dtype") else ""
        many = "float" in dtype and has_rows(leaf) and np.prod(leaf.shape, dtype="float64") > MOST_NUMBERS
        if place >= inputs or not many:
            numbers = _numbers(leaf)
            if numbers is not None:
                yield place, place >= inputs, numbers


def _numbers(leaf: Any) -> np.ndarray | None:
    try:
        if not has_rows(leaf) or getattr(leaf, "nse", None) is not None:  # a sparse array of JAX's
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
    limit, chosen = min(rows, LOOKED_THROUGH), list[int]()

    def choose(candidates: Iterable[int], most: int) -> None:
        for row in candidates:
            if row not in chosen and len(chosen) < most:
                chosen.append(row)

    choose(_showing(data, list(new)), max(1, 3 * count // 4))
    features = [feature for leaf in tree.flatten((y, sample_weight, x)) for feature in _features(leaf)]
    ends = [int(end(feature)) for feature in features for end in (np.argmin, np.argmax)]
    choose(ends, len(chosen) + max((count + 1) // 2 - len(chosen), (count - len(chosen)) // 2))
    choose([*np.linspace(0, limit - 1, count).astype(int).tolist(), *range(limit)], count)
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
            yield from np.flatnonzero(_shows(mark, numbers).reshape(len(numbers), -1).any(1)).tolist()[:2]


def _shows(mark: Hashable, numbers: np.ndarray) -> Any:
    """Where numbers `(rows, ..., columns)` show this."""
    if isinstance(mark, tuple):
        return numbers == mark[1] if mark[0] == "value" else numbers[..., mark[1]] != 0
    if mark in SIGNS:
        return SIGNS[mark](numbers)
    if mark in ("low", "high") and not np.isnan(numbers).all():
        return numbers == (np.nanmin(numbers) if mark == "low" else np.nanmax(numbers))
    return np.zeros(numbers.shape, bool)


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
