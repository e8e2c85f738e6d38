"""The proof of the first update: a few rows of the batch, whole and in micro-batches, through the step itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
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
from gradaccum.keras import backends
from gradaccum.keras.backends.rows import has_rows, rows_of, unpack
from gradaccum.keras.batch_norm import batch_norms_of
from gradaccum.keras.equivalence import Evaluation, StepRunner, find_causes, precision_of
from gradaccum.keras.private import compiled_losses, recorded_reads
from gradaccum.keras.train_step.sorts import Sorts, dealt, few_rows

__all__ = ["Proof", "ragged_size"]

ROWS = 16
"""Rows of the batch that are looked at, at most."""
ROWS_OF_AUTO = 8
"""The same where nobody has said how many fit into memory."""
WATCHED = 4096
"""The most numbers of a variable that is watched from one `fit` to the next."""


@dataclass
class _Proven:
    """What is known of batches of a kind.

    Attributes:
        sorts: The sorts of rows that were proved.
        watched: The variables that were read, and their values.
    """

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
        self._wanted = self._epoch_begun = self._on_batch = self._scheduled = False
        self._compiled: Any = None
        self._proven: dict[str, _Proven] = {}
        self._doubt = ""
        self._warned = False

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
        proven = self._known(data)
        wanted = self._wanted or self._scheduled or proven is None
        self._wanted = self._epoch_begun = False
        if not wanted and proven is not None and not self._changed(proven, state):
            return
        sorts = Sorts.of(data)
        new = (proven or _Proven()).sorts.new_in(sorts, ROWS)
        whole_reads: dict[int, Any] = {}
        order, reason = self._compare(data, state, rows, new, whole_reads)
        if proven is None:
            proven = self._proven.setdefault(self._kind(data), _Proven())
        proven.sorts.join(sorts, Sorts.of(data, order))
        # A function that is compiled reads variables while it is traced, and not again.
        watched = [*self._watched(whole_reads)] or [variable for variable, _ in proven.watched]
        proven.watched = [(variable, self._value(variable, state)) for variable in watched]
        if reason is not None:
            self._doubt = f"{type(reason).__name__}: {reason}".splitlines()[0]

    def _compare(
        self, data: Any, state: Any, rows: int, new: Any, reads: dict[int, Any]
    ) -> tuple[np.ndarray, Exception | None]:
        """Compare as many rows as can be, and judge. Returns which rows, and why nothing is known, if so."""
        reason: Exception | None = None
        order = np.arange(0)
        for few, size in _attempts(rows, self.step.micro_batch_size):
            order = dealt(few_rows(data, few, new), even_sizes(few, size))
            batch = tree.map_structure(lambda leaf, order=order: _take(leaf, order), data)
            runner = self._runner(batch, state, reads)
            comparison = Comparison(runner, range(few), [(range(few), even_sizes(few, size))], "raise")
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

    def _known(self, data: Any) -> _Proven | None:
        """What is known of batches of this kind."""
        compiled = compiled_losses(self.step.model)
        if compiled is not self._compiled:
            self._compiled = compiled
            self._proven.clear()
        return self._proven.get(self._kind(data))

    def _changed(self, proven: _Proven, state: Any) -> bool:
        """Whether a variable has changed that is watched."""
        return any(not np.array_equal(self._value(v, state), value, equal_nan=True) for v, value in proven.watched)

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

    def _runner(self, batch: Any, state: Any, reads: dict[int, Any]) -> StepRunner:
        """Runs rows of a batch as the step's updates do, with BatchNormalization frozen; notes what at once reads."""

        def evaluate(rows: np.ndarray, size: int, moved: Any) -> Evaluation:
            trial = self.step.trial(size, "frozen")
            if size < len(rows) or moved is not None:
                return trial.outcome(batch, state if moved is None else moved)
            with recorded_reads() as read:
                found = trial.outcome(batch, state)
            reads.update(read)
            return found

        precision = precision_of(self.step.model)
        return StepRunner(
            evaluate, lambda: self.step.state() if state is None else state, precision, rounding(precision) / 10
        )

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


def _take(leaf: Any, rows: np.ndarray) -> Any:
    return backends.running().take_rows(leaf, rows) if has_rows(leaf) else leaf
