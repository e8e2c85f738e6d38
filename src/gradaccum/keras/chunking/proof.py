"""Whether a layer gives the same for a few rows at once and in micro-batches, and which layer inside does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.errors import NotEquivalentError
from gradaccum.keras.batch_norm import BatchNorm, batch_norms_of, during_micro_batch
from gradaccum.keras.equivalence import as_array, held, mixing_layers, precision_of, recorded_calls, relative_error
from gradaccum.keras.loops import has_rows
from gradaccum.keras.loss import value_and_gradients
from gradaccum.keras.private import takes_training
from gradaccum.rounding import rounding
from gradaccum.sizes import even_sizes

__all__ = ["prove"]

ROWS, SIZE = 8, 3
"""Rows that are looked at, at most, and those of a micro-batch."""


def prove(
    layer: Any,
    plain: Callable[..., Any],
    in_chunks: Callable[[int], Callable[..., Any]],
    batch_norm: BatchNorm,
    args: Any,
    kwargs: Any,
) -> None:
    """Compare outputs and gradients. Random numbers are held, and nothing is moved.

    Args:
        layer: The layer.
        plain: Its own `call`.
        in_chunks: `in_chunks(size)`, the `call` that runs in micro-batches.
        batch_norm: What BatchNormalization does; what isn't exact counts, unless it is frozen.
        args, kwargs: What the layer is called with.

    Raises:
        NotEquivalentError: They differ.
        ValueError: There is but one row.
    """
    leaves = tree.flatten((args, kwargs))
    rows = min((leaf.shape[0] for leaf in leaves if has_rows(leaf)), default=0)
    if rows < 2:
        raise ValueError(f"verify needs at least 2 rows, to have something to compare. Received: {rows}.")
    few = min(rows, ROWS)
    sizes = even_sizes(few, min(SIZE, few - 1))
    parts = np.split(np.arange(few), np.cumsum(sizes)[:-1])
    if takes_training(layer):
        kwargs = {"training": True, **kwargs}
    trial = _Trial(layer, args, kwargs, "frozen" if batch_norm == "frozen" else "micro")
    tolerance = rounding(precision_of(layer))
    calls, whole = trial.calls(plain, np.arange(few))
    part_runs = [trial.calls(plain, part) for part in parts]
    causes = [*mixing_layers(layer, calls, [some for some, _ in part_runs], parts, tolerance)]
    together = [np.concatenate(pieces) for pieces in zip(*(outputs for _, outputs in part_runs))]
    worst = max((relative_error(a, b) for a, b in zip(together, whole)), default=0.0)
    if not causes and worst <= tolerance:
        expected, found = trial.gradients(plain, few), trial.gradients(in_chunks(max(sizes)), few)
        worst = max(map(relative_error, found, expected), default=0.0)
    if causes or not worst <= tolerance:
        said = [f"\n{cause.message}" for cause in causes]
        raise NotEquivalentError(
            f"The chunked {type(layer).__name__} {layer.name!r} gives {few} rows other outputs or gradients in "
            f"micro-batches of {', '.join(map(str, sizes))} than at once (relative error {worst:.3g}, {tolerance:.3g} "
            f"allowed).{''.join(said)}"
        )


class _Trial:
    def __init__(self, layer: Any, args: Any, kwargs: Any, batch_norm: BatchNorm) -> None:
        self.layer, self.arguments, self.batch_norm = layer, (args, kwargs), batch_norm
        if not layer.built:
            with keras.StatelessScope(), held():
                self._called(*self._taken(np.arange(2)))

    def _taken(self, rows: np.ndarray) -> Any:
        def taken(leaf: Any) -> Any:
            return ops.take(ops.convert_to_tensor(leaf), rows, axis=0) if has_rows(leaf) else leaf

        return tree.map_structure(taken, self.arguments)

    def _called(self, args: Any, kwargs: Any) -> list[Any]:
        with during_micro_batch(batch_norms_of(self.layer), self.batch_norm):
            return [leaf for leaf in tree.flatten(self.layer(*args, **kwargs)) if ops.is_tensor(leaf)]

    def calls(self, call: Callable[..., Any], rows: np.ndarray) -> tuple[Any, list[np.ndarray]]:
        """What goes into and comes out of each layer, and the outputs, of these rows."""
        own, vars(self.layer)["call"] = vars(self.layer)["call"], call
        try:
            with keras.StatelessScope(), held(), recorded_calls(self.layer) as calls:
                return calls, list(map(as_array, self._called(*self._taken(rows))))
        finally:
            vars(self.layer)["call"] = own

    def gradients(self, call: Callable[..., Any], rows: int) -> list[np.ndarray]:
        """Of the weights and inputs, for a loss that pulls each output elsewhere."""
        variables = self.layer.trainable_variables
        arguments = self._taken(np.arange(rows))
        leaves = tree.flatten(arguments)
        places = [n for n, leaf in enumerate(leaves) if has_rows(leaf) and keras.backend.is_float_dtype(leaf.dtype)]

        def loss(values: list[Any]) -> Any:
            for place, value in zip(places, values[len(variables) :]):
                leaves[place] = value
            args, kwargs = tree.pack_sequence_as(arguments, leaves)
            random = np.random.default_rng(0)
            with keras.StatelessScope(list(zip(variables, values))):
                outputs = self._called(args, kwargs)
            pulls = [random.normal(size=tuple(output.shape)) for output in outputs]
            return sum(
                ops.sum(output * ops.convert_to_tensor(pull, output.dtype))
                for output, pull in zip(outputs, pulls)
                if keras.backend.is_float_dtype(keras.backend.standardize_dtype(output.dtype))
            )

        own, vars(self.layer)["call"] = vars(self.layer)["call"], call
        try:
            with held():
                values = [ops.convert_to_tensor(variable.value) for variable in variables]
                _, found = value_and_gradients(loss, [*values, *(leaves[place] for place in places)])
        finally:
            vars(self.layer)["call"] = own
        return [np.zeros(1) if gradient is None else as_array(gradient) for gradient in found]
