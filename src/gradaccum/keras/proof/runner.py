"""What the large batch and its micro-batches give: the adapter of Keras for a proof."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from gradaccum.core.numpy_arrays import ArrayRunner, largest
from gradaccum.core.proof import Comparison, Outcome
from gradaccum.core.sizes import even_sizes
from gradaccum.core.ways import Way
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import is_float
from gradaccum.keras.batch_norm import BatchNorm
from gradaccum.keras.loss import as_array, take_rows
from gradaccum.keras.proof.held import Draws

_SMALL = 1e-2
"""Tensors that are smaller than the largest gradient by this factor are measured by that one: where a gradient is zero,
as that of the bias of attention's keys, all of it is rounding."""


def outcome_of(model: Any, loss: Any, gradients: list[Any], before: list[Any], after: list[Any]) -> Outcome:
    """By name: a batch's loss and gradients, and how its forward passes moved the non-trainable variables."""

    def named(variables: Sequence[Any], values: Any, taken: Any = ()) -> dict[str, Any]:
        """These by the paths of variables, of which several may be the same."""
        found: dict[str, Any] = {}
        for place, (variable, value) in enumerate(zip(variables, values)):
            name = variable.path.removeprefix(f"{model.name}/").replace("/", ".")
            found[f"{name}#{place}" if name in found or name in taken else name] = value
        return found

    arrays = [None if gradient is None else as_array(gradient) for gradient in gradients]
    scale = _SMALL * max((largest(array) for array in arrays if array is not None), default=0.0)
    trained = named(model.trainable_variables, arrays)
    floors, moves = dict.fromkeys(trained, scale), {}
    pairs = zip(map(as_array, before), map(as_array, after))
    for name, (old, new) in named(model.non_trainable_variables, pairs, trained).items():
        moves[name] = new.astype("float64") - old.astype("float64")
        is_whole = old.dtype.kind in "iub" or not moves[name].any()
        floors[name] = 0.0 if is_whole else _SMALL * max(largest(old), largest(new))
    return Outcome({"loss": as_array(loss)}, trained, moves, floors)


class StepRunner(ArrayRunner):
    """Runs a training step of Keras for a proof, by its trials, from a state or with the variables as they are."""

    def __init__(
        self, step: Any, data: Any, rows: int, batch_norm: BatchNorm, tolerance: float | None = None, state: Any = None
    ) -> None:
        self.step, self.data, self.rows, self.batch_norm, self.state = step, data, rows, batch_norm, state
        self.precision, self.device, self.draws = precision_of(step.model), backends.running().device(), Draws()
        self._tolerance = tolerance

    @property
    def tolerance(self) -> float:
        return super().tolerance if self._tolerance is None else self._tolerance

    def doubt(self, comparison: Comparison[Any]) -> str:
        """Why nobody knows what makes the differences, if so; else `comparison.wrong` are those beyond rounding."""
        if not comparison.wrong:
            return ""
        if not self.draws.raw:
            comparison.judged()
        if comparison.unrepeated or self.draws.raw:
            return "it draws random numbers that can't be made the same for each row, or changes with every call"
        return ""

    def run(self, way: Way | None) -> Outcome:
        rows, sizes = way or (range(self.rows), [self.rows])
        assert list(sizes) == even_sizes(len(rows), max(sizes))
        trial = self.step.trial(max(sizes), self.batch_norm)
        found: Outcome = trial.outcome(take_rows(self.data, np.asarray(rows)), self.state)
        self.draws = trial.draws
        # A moved variable may heed the order of rows, such as the last row's value.
        return found if [*rows] == sorted(rows) else dataclasses.replace(found, buffers=None)

    @contextlib.contextmanager
    def moved(self, seed: int, *, far: bool = False) -> Iterator[StepRunner]:
        weights, *others = self.state or self.step.state()
        there = copy.copy(self)
        there.state = (self.moved_values(weights, seed, far=far), *others)
        yield there

    def moved_values(self, values: Sequence[Any], seed: int, *, far: bool) -> list[Any]:
        factors = self.factors(seed, far=far)
        return [v * ops.convert_to_tensor(factors(tuple(v.shape)), v.dtype) if is_float(v) else v for v in values]


def precision_of(model: Any) -> str:
    """The narrowest dtype that a compiled model computes in."""
    dtypes = {variable.dtype for variable in model.trainable_variables}
    dtypes |= {layer.compute_dtype for layer in [model, *private.layers_in(model)] if layer.compute_dtype}
    dtypes |= {getattr(one.loss, "dtype", None) for one in private.loss_entries(private.compiled_losses(model))}
    if keras.backend.backend() != "tensorflow":  # `result_type` makes float32 of float64 in parts of losses and layers
        dtypes.add("float32")
    order = ["float64", "float32", "bfloat16", "float16"]
    return max((dtype for dtype in dtypes if dtype in order), key=order.index, default="float32")
