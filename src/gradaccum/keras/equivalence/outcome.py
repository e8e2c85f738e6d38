"""What one update is made of, as numbers, and the runner that evaluates it for a proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from gradaccum.core.numpy_arrays import ArrayRunner, largest
from gradaccum.core.proof import Outcome
from gradaccum.core.rounding import last_place
from gradaccum.core.sizes import even_sizes
from gradaccum.keras.equivalence.layer_calls import dotted
from gradaccum.keras.equivalence.random_numbers import Draws
from gradaccum.keras.private import compiled_losses, layers_in, loss_entries

__all__ = ["Evaluation", "StepRunner", "as_array", "precision_of"]

_SMALL = 1e-2
"""Tensors that are smaller than the largest gradient by this factor are measured by that one: where a gradient is zero,
as that of the bias of attention's keys, all of it is rounding."""
NEARBY = 2
"""How often the weights are moved by one unit in the last place, to see what rounding makes of a result."""


@dataclass
class Evaluation:
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

    def outcome(self) -> Outcome:
        """The same by name; of variables, how they have moved."""
        scale = _SMALL * max((largest(gradient) for gradient in self.gradients if gradient is not None), default=0.0)
        trained = self._named(self.model.trainable_variables, self.gradients)
        floors = dict.fromkeys(trained, scale)
        moved = self._named(self.model.non_trainable_variables, zip(self.before, self.after), trained)
        for name, (before, after) in moved.items():
            floors[name] = 0.0 if before.dtype.kind in "iub" else _SMALL * max(largest(before), largest(after))
        moves = {name: after.astype("float64") - before.astype("float64") for name, (before, after) in moved.items()}
        unmoved = [name for name, move in moves.items() if not move.any()]
        floors.update(dict.fromkeys(unmoved, 0.0))
        return Outcome({"loss": self.loss}, trained, moves, floors)

    def _named(self, variables: Sequence[Any], values: Any, taken: Any = ()) -> dict[str, Any]:
        """These by the paths of variables, of which several may be the same."""
        named: dict[str, Any] = {}
        for place, (variable, value) in enumerate(zip(variables, values)):
            name = dotted(self.model, variable.path)
            named[f"{name}#{place}" if name in named or name in taken else name] = value
        return named


class StepRunner(ArrayRunner):
    """Runs training steps of Keras for a proof."""

    def __init__(
        self,
        evaluate: Callable[[np.ndarray, int, Any], Evaluation],
        state: Callable[[], Any],
        precision: str,
        tolerance: float,
    ) -> None:
        self._evaluate, self._state, self._precision, self.tolerance = evaluate, state, precision, tolerance
        self.in_half = precision in ("bfloat16", "float16")
        self.draws = Draws()

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None) -> Outcome:
        """These rows in micro-batches of these sizes, which are even; None: at once."""
        assert sizes is None or list(sizes) == even_sizes(len(rows), max(sizes))
        return self._run(rows, len(rows) if sizes is None else max(sizes), None)

    def _run(self, rows: Sequence[int], size: int, state: Any) -> Outcome:
        evaluation = self._evaluate(np.asarray(rows), size, state)
        self.draws = evaluation.draws
        return evaluation.outcome()

    def nearby(self, rows: Sequence[int]) -> Iterator[Outcome]:
        """The rows at once, with weights that differ by a unit in the last place."""
        weights, *others = self._state()
        for moved in self._nearby(weights):
            yield self._run(rows, len(rows), (moved, *others))

    def _nearby(self, weights: Sequence[Any]) -> Iterator[list[Any]]:
        """Weights that differ from these by a unit in the last place."""
        random, unit = np.random.default_rng(0), last_place(self._precision)

        def moved(value: Any) -> Any:
            if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
                return value
            signs = random.choice([-1.0, 1.0], tuple(value.shape))
            return value * ops.convert_to_tensor(1.0 + unit * signs, value.dtype)

        for _ in range(NEARBY):
            yield [moved(value) for value in weights]


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
