"""What one update is made of, as numbers, and how far two of them are apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from gradaccum.core.equivalence import Difference
from gradaccum.keras.equivalence.layer_calls import dotted
from gradaccum.keras.equivalence.random_numbers import Draws
from gradaccum.keras.private import compiled_losses, layers_in, loss_entries

__all__ = ["Outcome", "as_array", "precision_of", "relative_error"]

_SMALL = 1e-2
"""Tensors that are smaller than the largest gradient by this factor are measured by that one: where a gradient is zero,
as that of the bias of attention's keys, all of it is rounding."""


@dataclass
class Outcome:
    """The loss and the gradients of a batch, and what its forward passes moved.

    Attributes:
        model: Whose.
        loss: Its value.
        gradients: Of each trainable variable; None where no gradient reaches it.
        before, after: Each non-trainable variable, before and after.
        draws: What random numbers were drawn.
    """

    model: Any
    loss: np.ndarray
    gradients: list[np.ndarray | None]
    before: list[np.ndarray] = field(default_factory=list)
    after: list[np.ndarray] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)

    def differences(self, whole: Outcome) -> list[Difference]:
        """How far each part is from that of the whole batch."""
        found = [Difference("loss", relative_error(self.loss, whole.loss), "loss", int(np.size(whole.loss)))]
        largest = max((_largest(g) for g in whole.gradients if g is not None), default=0.0)
        for variable, ours, theirs in zip(self.model.trainable_variables, self.gradients, whole.gradients):
            if ours is None and theirs is None:
                continue
            ours, theirs = (np.zeros(variable.shape) if g is None else g for g in (ours, theirs))
            error = relative_error(ours, theirs, floor=_SMALL * largest)
            found.append(Difference(dotted(self.model, variable.path), error, "gradient", int(theirs.size)))
        for variable, before, ours, theirs in zip(
            self.model.non_trainable_variables, self.before, self.after, whole.after
        ):
            if np.array_equal(ours, before) and np.array_equal(theirs, before):
                continue
            floor = 0.0 if before.dtype.kind in "iub" else _SMALL * max(_largest(before), _largest(theirs))
            error = relative_error(_difference(ours, before), _difference(theirs, before), floor)
            found.append(Difference(dotted(self.model, variable.path), error, "buffer", int(theirs.size)))
        return found


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a, "float64") - np.asarray(b, "float64")


def _largest(array: np.ndarray) -> float:
    array = np.abs(np.asarray(array, "float64"))
    return float(array[np.isfinite(array)].max(initial=0.0))


def relative_error(actual: Any, expected: Any, floor: float = 0.0) -> float:
    """`max|actual - expected| / max|expected|`; inf where only one of both is finite.

    Args:
        actual: What was computed.
        expected: What it should be.
        floor: The smallest scale to divide by.
    """
    actual, expected = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    finite = np.isfinite(expected)
    if actual.shape != expected.shape or not np.array_equal(np.isfinite(actual), finite):
        return float("inf")
    scale = max(_largest(expected), floor)
    difference = float(np.abs(actual - expected, where=finite, out=np.zeros(actual.shape)).max(initial=0.0))
    return difference / scale if scale else (float("inf") if difference else 0.0)


def as_array(value: Any) -> np.ndarray:
    """A tensor as numbers, half precision in float32."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    return np.array(
        ops.convert_to_numpy(ops.cast(value, "float32") if "float" in dtype and "64" not in dtype else value)
    )


def precision_of(model: Any) -> str:
    """The narrowest dtype that a compiled model computes in."""
    dtypes = {variable.dtype for variable in model.trainable_variables}
    dtypes |= {layer.compute_dtype for layer in [model, *layers_in(model)] if layer.compute_dtype}
    if compiled_losses(model) is not None:
        dtypes |= {getattr(entry.loss, "dtype", None) for entry in loss_entries(compiled_losses(model))}
    order = ["float64", "float32", "bfloat16", "float16"]
    if keras.backend.backend() != "tensorflow":
        dtypes.add(
            "float32"
        )  # `keras.backend.result_type` makes float32 of float64 in parts of Keras' losses and layers
    return max((dtype for dtype in dtypes if dtype in order), key=order.index, default="float32")
