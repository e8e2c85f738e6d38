"""The proof of the first update: a few rows of the batch, whole and in micro-batches, through the step itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.equivalence import Equivalence
from gradaccum.errors import NotEquivalentError
from gradaccum.keras.batch_norm import batch_norms_of
from gradaccum.keras.equivalence import Outcome, find_causes, precision_of
from gradaccum.keras.private import compiled_losses, recorded_reads
from gradaccum.keras.train_step.data import has_rows, rows_of, unpack
from gradaccum.rounding import rounding

__all__ = ["Proof", "few_rows", "ragged_size"]

ROWS = 16
"""Rows of the batch that are looked at, at most."""
ROWS_OF_AUTO = 8
"""The same where nobody has said how many fit into memory."""
LOOKED_THROUGH = 4096
"""Rows among which they are chosen."""
WATCHED = 4096
"""The most numbers of a variable that is watched from one `fit` to the next."""


class Proof:
    """Compares, once per `fit`, what a few rows of the first batch give whole and in ragged micro-batches.

    Loss, gradients and moved variables are computed by the step that then makes the updates, with random numbers held
    and BatchNormalization frozen, which has a warning of its own. A later `fit` is looked at again where the batches
    are of another kind, the model has been compiled anew, or a variable has changed that its loss reads and that the
    optimizer doesn't train.

    Differences above what rounding makes of the compared dtype are told from an ill-conditioned model's rounding: they
    must be larger than what moving the weights by one unit in the last place changes.

    Args:
        step: The `MicroBatchedStep` whose updates are proved.
    """

    def __init__(self, step: Any) -> None:
        self.step = step
        self.begun = False
        """Whether a `fit` has begun whose first batch has not come yet."""
        self._proven: dict[Any, list[tuple[Any, np.ndarray]]] = {}
        self._doubt = ""
        self._told = False

    def begin(self) -> None:
        """A `fit` begins."""
        self.begun = True

    def due(self, batch: Any, state: Any = None) -> bool:
        """Whether batches like this have still to be proved.

        Args:
            batch: A batch, or its specification.
            state: As for `MicroBatchedStep.outcome`.
        """
        watched = self._proven.get(self._kind(batch))
        self.begun = watched is None or any(
            not np.array_equal(self._value(variable, state), value, equal_nan=True) for variable, value in watched
        )
        return self.begun

    def run(self, data: Any, state: Any = None) -> None:
        """Prove the update of this batch, if that is due.

        Raises:
            NotEquivalentError: Micro-batches give another update; the message names why, and what to do.
        """
        if not self.due(data, state):
            return
        self.begun = False
        try:
            rows = rows_of(data)
        except ValueError:  # the step itself says it better
            return
        if rows is None or rows < 2:
            return
        whole_reads: dict[int, Any] = {}
        reason: Exception | None = None
        for few, size in _attempts(rows, self.step.micro_batch_size):
            order = few_rows(data, few)
            batch = tree.map_structure(lambda leaf, order=order: _take(leaf, order), data)
            try:
                with recorded_reads() as reads:
                    whole = self.step.trial(few, "frozen").outcome(batch, state)
                whole_reads.update(reads)
                if not np.isfinite(whole.loss).all():
                    reason = reason or ValueError(f"the loss of {few} rows at once is {whole.loss}")
                    break
                parts = self.step.trial(size, "frozen").outcome(batch, state)
            except NotEquivalentError:
                raise
            except Exception as error:
                reason = reason or error
                continue
            reason = None
            self._judge(batch, few, size, whole, parts, state)
            break
        self._proven[self._kind(data)] = [(v, self._value(v, state)) for v in self._watched(whole_reads)]
        if reason is not None:
            self._doubt = f"{type(reason).__name__}: {reason}".splitlines()[0]

    def say(self) -> None:
        """Warn, once, of an update that has been made although it could not be proved."""
        if self._doubt and not self._told:
            self._told = True
            warnings.warn(
                "micro_batched compares the first update on a few rows of its batch, whole and in micro-batches, which "
                f"could not be done here ({self._doubt}). So it isn't known whether updates are the large batch's: "
                "gradaccum.keras.check_equivalence tells. micro_batched(..., verify=False) leaves the comparison out.",
                stacklevel=2,
            )
        self._doubt = ""

    def _judge(self, batch: Any, rows: int, size: int, whole: Outcome, parts: Outcome, state: Any) -> None:
        model = self.step.model
        precision = precision_of(model)
        sharp = rounding(precision) / 10
        differences = [d for d in parts.differences(whole) if not d.error <= sharp]
        if not differences:
            return
        if parts.draws.raw or whole.draws.raw or self._random(batch, rows, whole, sharp, state):
            self._doubt = "it draws random numbers that don't come from keras.random, and can't be held"
            return
        noise = self._noise(batch, rows, whole, precision, state)
        differences = [d for d in differences if not d.error <= 10 * noise.get((d.part, d.name), 0.0)]
        if not differences:
            return
        sizes = [len(part) for part in np.array_split(np.arange(rows), -(-rows // size))]
        cuts = np.split(np.arange(rows), np.cumsum(sizes)[:-1])
        values = self.step.state() if state is None else state
        causes = find_causes(
            model, (values[0], values[1], values[3]), unpack(batch), cuts, differences, sharp, "frozen"
        )
        try:
            Equivalence(tuple(differences), sharp, tuple(causes), rows=rows).raise_if_different()
        except NotEquivalentError as error:
            raise NotEquivalentError(
                f"{error}\nThat is of {rows} rows of the first batch, whole and in micro-batches of "
                f"{', '.join(map(str, sizes))}; nothing has been trained. micro_batched(..., verify=False) trains all "
                "the same."
            ) from None

    def _random(self, batch: Any, rows: int, whole: Outcome, sharp: float, state: Any) -> bool:
        """Whether the same rows give something else the next time."""
        again = self.step.trial(rows, "frozen").outcome(batch, state)
        return any(not d.error <= sharp for d in again.differences(whole) if d.part != "buffer")

    def _noise(self, batch: Any, rows: int, whole: Outcome, precision: str, state: Any) -> dict[tuple[str, str], float]:
        """How far each part moves with weights that differ in the last place."""
        values = self.step.state() if state is None else state
        unit = float(np.finfo("float64" if precision == "float64" else "float32").eps)
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(precision, unit)
        random = np.random.default_rng(0)

        def moved(value: Any) -> Any:
            if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
                return value
            signs = random.choice([-1.0, 1.0], tuple(value.shape))
            return value * ops.convert_to_tensor(1.0 + unit * signs, value.dtype)

        nearby = ([moved(value) for value in values[0]], *values[1:])
        outcome = self.step.trial(rows, "frozen").outcome(batch, nearby)
        return {(d.part, d.name): d.error for d in outcome.differences(whole) if math.isfinite(d.error)}

    def _kind(self, batch: Any) -> Any:
        def kind(leaf: Any) -> Any:
            if leaf is None or not hasattr(leaf, "shape"):
                return None
            return len(leaf.shape), keras.backend.standardize_dtype(leaf.dtype)

        model = self.step.model
        return id(compiled_losses(model)), len(model.trainable_variables), str(tree.map_structure(kind, unpack(batch)))

    def _watched(self, reads: dict[int, Any]) -> Iterator[Any]:
        """Of the variables that were read, those whose change means something."""
        trained, _, optimizer, metrics = self.step.variables()
        moving = [v for layer in batch_norms_of(self.step.model) for v in layer.variables]
        others = {id(variable) for variable in (*trained, *optimizer, *metrics, *moving)}
        for variable in reads.values():
            seed = "seed_generator_state" in (variable.path or "")
            if not seed and id(variable) not in others and math.prod(variable.shape) <= WATCHED:
                yield variable

    def _value(self, variable: Any, state: Any) -> np.ndarray:
        if state is not None:
            for variables, values in zip(self.step.variables(), state):
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


def few_rows(data: Any, count: int) -> np.ndarray:
    """Which rows to look at: the extremes of what can be told of a row, apart from each other.

    Rows with missing labels, padding or weights of zero are rare, and what they do shows where one part has more of
    them than the other.
    """
    x, y, sample_weight = unpack(data)
    rows = rows_of(data)
    assert rows is not None
    features: list[np.ndarray] = []
    for leaf in tree.flatten((y, sample_weight, x)):
        if has_rows(leaf):
            features += _features(leaf)
    if not features:
        return np.arange(count)
    limit = len(features[0])
    chosen: list[int] = []
    for feature in features:
        for row in (int(np.argmin(feature)), int(np.argmax(feature))):
            if row not in chosen and len(chosen) < (count + 1) // 2:
                chosen.append(row)
    for row in [*np.linspace(0, limit - 1, count).astype(int).tolist(), *range(limit)]:
        if row not in chosen and len(chosen) < count:
            chosen.append(row)
    order = np.lexsort([feature[chosen] for feature in reversed(features)])
    return np.array(chosen)[order]


def _features(leaf: Any) -> list[np.ndarray]:
    """Of each row: missing numbers, negative ones, zeros, the largest and the mean."""
    try:
        numbers = np.asarray(ops.convert_to_numpy(leaf[:LOOKED_THROUGH])).astype("float64")
    except Exception:  # sparse, ragged, strings
        return []
    numbers = numbers.reshape(len(numbers), -1)[:, :LOOKED_THROUGH]
    if not numbers.shape[1]:
        return []
    known = np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    found = [np.isnan(numbers).sum(1), (numbers < 0).sum(1), (numbers == 0).sum(1), known.max(1), known.mean(1)]
    return [np.asarray(feature, "float64") for feature in found if len(np.unique(feature)) > 1]


def _take(leaf: Any, rows: np.ndarray) -> Any:
    if not has_rows(leaf):
        return leaf
    if keras.backend.backend() != "tensorflow":
        return leaf[rows]
    import tensorflow as tf

    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.slice(leaf, [0] * len(leaf.shape), [len(rows), *leaf.shape[1:]])
    return tf.gather(leaf, rows)
