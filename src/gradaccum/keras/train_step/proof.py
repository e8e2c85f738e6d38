"""The proof of an update: a few rows of the batch, whole and in micro-batches, through the step itself.

And which few rows show what a loss may treat apart: missing labels, padding, classes, weights, large values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.equivalence import Difference, Equivalence
from gradaccum.core.proof import Comparison, ProofSchedule
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import private
from gradaccum.keras.backends.base import has_rows, rows_of, unpack
from gradaccum.keras.equivalence import StepRunner, find_causes, precision_of, take_rows

ROWS = 16
"""Rows of the batch that are looked at, at most."""
ROWS_OF_AUTO = 8
"""The same where nobody has said how many fit into memory."""
LOOKED_THROUGH = 4096
"""Rows among which the few that are proved are chosen, and columns that are looked at."""
MOST_NUMBERS = 2**20
"""The numbers of an array that are looked at, about: of larger ones every n-th."""
VALUES = 64
"""The most whole numbers, and classes in columns, of an array that are told apart."""


class Proof:
    """Compares what a few rows of a batch give whole and in ragged micro-batches.

    Loss, gradients and moved variables are computed by the step that then makes the updates, with random numbers held
    and BatchNormalization frozen, which has a warning of its own. That happens at updates 1, 2, 4, 8, ... since the
    model was compiled, with the first batch of each `fit`, and with batches of another kind for `train_on_batch`. All
    other updates make no call of this.
    """

    def __init__(self, step: Any) -> None:
        self.step, self.schedule = step, ProofSchedule()
        self._wanted = self._seen = self._warned = False
        self._compiled: Any = None
        self._proven: set[str] = set()
        self._doubt = ""

    def begin(self, is_new: bool) -> None:
        """The training function is asked for, made anew or as it is: by a `fit`, if no batch comes by itself."""
        if is_new:
            self.schedule = ProofSchedule()
        self._wanted, self._seen = self._wanted or not self._seen, False

    def see(self, data: Any) -> None:
        """This batch comes next, by itself."""
        self._seen = True
        self._wanted = self._wanted or self._kind(data) not in self._proven

    def is_due(self, updates: int) -> bool:
        """Whether one of the next updates, so many, is to be proved."""
        return any([*map(self.schedule.is_due, [False] * updates)]) or self._wanted

    def run(self, data: Any, state: Any = None) -> None:
        """Prove the update of this batch, which is due."""
        rows = rows_of(data)
        if rows is None or rows < 2:
            return
        self._wanted = False
        compiled = private.compiled_losses(self.step.model)
        if compiled is not self._compiled:
            self._compiled = compiled
            self._proven.clear()
        self._proven.add(self._kind(data))
        reason: Exception | None = None
        allowed = rounding(precision_of(self.step.model)) / 10
        for few, size in _attempts(rows, self.step.micro_batch_size):
            sizes = even_sizes(few, size)
            batch = take_rows(data, dealt(few_rows(data, few), sizes))
            runner = StepRunner(self.step, batch, "frozen", allowed, state)
            comparison = Comparison(runner, range(few), [(range(few), sizes)], "raise")
            try:
                loss = comparison.large.losses["loss"]
                if np.isfinite(loss).all():
                    differences = comparison.differences() or []
                    self._judge(runner, batch, comparison, differences, state)
                    return
                reason = reason or ValueError(f"the loss of {few} rows at once is {loss}")
                break
            except NotEquivalentError:
                raise
            except Exception as error:
                reason = reason or error
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

    def _judge(
        self, runner: StepRunner, batch: Any, comparison: Comparison, differences: Sequence[Difference], state: Any
    ) -> None:
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


def few_rows(data: Any, count: int) -> np.ndarray:
    """Which rows to look at, sorted by what can be told of them: what few rows show, the extremes, and others.

    Of each sort of rows (with missing labels, padding, weights of zero, a class) there are two, the rarest sorts first:
    they are what others wouldn't hold, and what a loss does with them shows where one part has more of them.
    """
    rows = rows_of(data)
    assert rows is not None
    limit, chosen = min(rows, LOOKED_THROUGH), list[int]()

    def choose(candidates: Iterable[int], most: int) -> None:
        chosen.extend([row for row in dict.fromkeys(candidates) if row not in chosen][: max(most - len(chosen), 0)])

    x, y, sample_weight = unpack(data)
    sorts: list[np.ndarray] = []
    features: list[np.ndarray] = []
    for part, closely in (((y, sample_weight), True), (x, False)):
        for leaf in tree.flatten(part):
            numbers = _numbers(leaf, limit)
            if numbers is not None:
                sorts += _sorts(numbers, closely)
                features += _features(numbers)
    sorts.sort(key=np.count_nonzero)
    choose([row for sort in sorts for row in np.flatnonzero(sort).tolist()[:2]], max(1, count // 2))
    choose([int(end(feature)) for feature in features for end in (np.argmin, np.argmax)], max(1, 3 * count // 4))
    choose([*np.linspace(0, limit - 1, count).astype(int).tolist(), *range(rows)], count)
    order = np.lexsort([feature[chosen] for feature in reversed(features)]) if features else np.argsort(chosen)
    return np.array(chosen)[order]


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


def _numbers(leaf: Any, limit: int) -> np.ndarray | None:
    """Some numbers of each of the first rows, `(rows, numbers, columns)`; None of what has none to look at."""
    try:
        if not has_rows(leaf) or getattr(leaf, "nse", None) is not None:  # a sparse array of JAX's
            return None
        numbers = np.asarray(ops.convert_to_numpy(leaf[:limit]))
        numbers = numbers.reshape(len(numbers), -1, numbers.shape[-1] if numbers.ndim > 1 else 1)
        stride = -(-numbers.size // MOST_NUMBERS)
        numbers = numbers[:, ::stride, :LOOKED_THROUGH].astype("float64")
    except Exception:  # sparse, ragged, strings
        return None
    return numbers if numbers.size else None


def _sorts(numbers: np.ndarray, closely: bool) -> Iterator[np.ndarray]:
    """Which rows show what: something missing, below zero, zero; of targets each whole number, column, and end."""
    signs = [np.isnan(numbers), np.isinf(numbers), numbers < 0, numbers == 0]
    known = numbers[np.isfinite(numbers)]
    if closely and known.size:
        values = np.unique(known)
        whole = values[values == np.floor(values)]
        signs += [numbers == value for value in (whole if len(whole) <= VALUES else ())]
        signs += [numbers == end for end in (values[0], values[-1])]
        if 1 < numbers.shape[2] <= VALUES:
            signs += [numbers[..., column] != 0 for column in range(numbers.shape[2])]
    for sign in signs:
        shown = sign.reshape(len(numbers), -1).any(1)
        if shown.any() and not shown.all():
            yield shown


def _features(numbers: np.ndarray) -> list[np.ndarray]:
    """Of each row: missing numbers, negative ones, zeros, the largest and its place, and the mean."""
    numbers = numbers.reshape(len(numbers), -1)
    known = np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    found = [np.isnan(numbers).sum(1), (numbers < 0).sum(1), (numbers == 0).sum(1)]
    found += [known.max(1), known.argmax(1), known.mean(1)]
    return [np.asarray(feature, "float64") for feature in found if len(np.unique(feature)) > 1]
