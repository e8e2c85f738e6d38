"""The proof of an update: a few rows of the batch, whole and in micro-batches, through the step itself.

And which few rows show what a loss may treat apart: missing labels, padding, classes, weights, large values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops, tree

from gradaccum.core.equivalence import Equivalence
from gradaccum.core.numpy_arrays import numbers_of_rows, rows_to_prove
from gradaccum.core.proof import Comparison
from gradaccum.core.proof_schedule import ENOUGH, ROWS
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.core.ways import ragged_size, telling_order
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import private
from gradaccum.keras.backends.base import has_rows, rows_of, unpack
from gradaccum.keras.loss import take_rows
from gradaccum.keras.proof import StepRunner, find_causes, precision_of
from gradaccum.keras.train_step.due import UpdatesToProve

LOOKED_THROUGH = 4096
"""Rows among which the few that are proved are chosen, and columns that are looked at."""
MOST_NUMBERS = 2**20
"""The numbers of an array that are looked at, about: of larger ones every n-th."""


class Proof:
    """Compares what a few rows of a batch give whole and in ragged micro-batches.

    Loss, gradients and moved variables are computed by the step that then makes the updates, with random numbers held
    and BatchNormalization frozen, which has a warning of its own. That happens at updates 1, 2, 4, 8, ... since the
    model was compiled, with the first batch of each `fit`, and with batches of another kind for `train_on_batch`. All
    other updates make no call of this.
    """

    def __init__(self, step: Any) -> None:
        self.step, self.due = step, UpdatesToProve(step.model)
        self._compiled: Any = None
        self._warned = False
        self._doubt = ""
        self._moved: dict[str, bool] = {}
        """The variables that move with each micro-batch, and whether a warning has named them."""

    def run(self, data: Any, state: Any = None) -> None:
        """Prove the update of this batch, which is due."""
        rows = rows_of(data)
        if rows is None or rows < 2:
            return
        compiled = private.compiled_losses(self.step.model)
        if compiled is not self._compiled:
            self._compiled = compiled
            self.due.forget()
        self.due.remember(data)
        reason: Exception | None = None
        for few, size in _attempts(rows, self.step.micro_batch_size):
            try:
                self._doubt = self._compare(data, few, even_sizes(few, size), state)
                return
            except NotEquivalentError:
                raise
            except Exception as error:
                reason = reason or error
                if isinstance(error, FloatingPointError):
                    break
        self._doubt = f"{type(reason).__name__}: {reason}".splitlines()[0]

    def warn(self) -> None:
        """Warn, once, of an update that could not be proved, and of variables that move with each micro-batch."""
        if self._doubt and not self._warned:
            self._warned = True
            warnings.warn(
                "micro_batched compares a few rows of a batch at once with the same rows in micro-batches. Here it "
                f"could not ({self._doubt}), so updates may differ from the large batch's. To find out, call "
                "gradaccum.keras.check_equivalence with a batch; micro_batched(..., verify=False) turns the comparison "
                "off.",
                stacklevel=2,
            )
        self._doubt = ""
        if moved := [name for name, is_named in self._moved.items() if not is_named]:
            self._moved.update(dict.fromkeys(moved, True))
            warnings.warn(
                "Variables move in the forward pass, so once per micro-batch and not once per update: "
                f"{', '.join(map(repr, moved))}. Loss and gradients are the large batch's. To move them once, do it in "
                "a callback's on_train_batch_end.",
                stacklevel=2,
            )

    def _compare(self, data: Any, few: int, sizes: list[int], state: Any) -> str:
        """Raise what these few rows make different. Returns why it isn't known, if it isn't."""
        allowed = rounding(precision_of(self.step.model)) / 10
        batch = take_rows(data, np.asarray(few_rows(data, sizes)))
        runner = StepRunner(self.step, batch, few, "frozen", allowed, state)
        comparison = Comparison(runner, [(range(few), sizes)], "raise")
        loss = comparison.large.losses["loss"]
        if not np.isfinite(loss).all():
            raise FloatingPointError(f"the loss of {few} rows at once is {loss}")
        comparison.differences()
        doubt = runner.doubt(comparison)
        if doubt:
            return doubt
        wrong = comparison.wrong
        if wrong and all(difference.part == "buffer" for difference in wrong):
            self._moved = dict.fromkeys((difference.name for difference in wrong), False) | self._moved
        elif wrong:
            causes = find_causes(runner, (range(few), sizes), wrong)
            try:
                Equivalence(tuple(wrong), allowed, tuple(causes), rows=few).raise_if_different()
            except NotEquivalentError as error:
                raise NotEquivalentError(
                    f"{error}\n{few} rows of the batch were compared, at once and in micro-batches of "
                    f"{', '.join(map(str, sizes))}. Nothing has been trained with this batch. To train anyway, pass "
                    "micro_batched(..., verify=False)."
                ) from None
        return ""


def _attempts(rows: int, micro_batch_size: Any) -> Iterator[tuple[int, int]]:
    """`(rows, size of micro-batches)` to compare until one can be: ragged, then in halves, of fewer and fewer rows."""
    most = min(rows, ENOUGH if micro_batch_size == "auto" else max(2, min(ROWS, 2 * micro_batch_size)))
    while most >= 2:
        few = most - (ragged_size(most) is None and most > 2)
        yield few, ragged_size(few) or 1
        yield most - most % 2, most // 2
        most //= 2


# Which rows.


def few_rows(data: Any, sizes: Sequence[int]) -> list[int]:
    """Which rows to look at, ordered for parts of these sizes so that they tell what a loss divides by."""
    limit = min(rows_of(data) or 0, LOOKED_THROUGH)
    x, y, sample_weight = unpack(data)
    parts = ("", y), ("weight", sample_weight), ("", x)
    leaves = [(name, leaf) for name, part in parts for leaf in tree.flatten(part)]
    arrays = [(name, found) for name, leaf in leaves if (found := _numbers(leaf, limit)) is not None]
    chosen = rows_to_prove(arrays, limit, sum(sizes))
    columns = numbers_of_rows((name, array[chosen]) for name, array in arrays)
    return [chosen[place] for place in telling_order(sizes, columns)]


def _numbers(leaf: Any, limit: int) -> np.ndarray | None:
    """Some numbers of each of the first rows; None of what has none to look at."""
    try:
        if not has_rows(leaf) or getattr(leaf, "nse", None) is not None:  # a sparse array of JAX's
            return None
        numbers = np.asarray(ops.convert_to_numpy(leaf[:limit]))
        if numbers.dtype.kind == "V":  # bfloat16
            numbers = numbers.astype("float32")
        stride = -(-numbers.size // MOST_NUMBERS)
        if numbers.ndim > 1 and (stride > 1 or numbers.shape[-1] > LOOKED_THROUGH):
            numbers = numbers.reshape(len(numbers), -1, numbers.shape[-1])[:, ::stride, :LOOKED_THROUGH]
    except Exception:  # sparse, ragged, strings
        return None
    return numbers if numbers.size and numbers.dtype.kind in "biuf" else None
