"""What one update is made of, as numbers, the runner that evaluates it for a proof, and the random numbers of that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.numpy_arrays import ArrayRunner, largest
from gradaccum.core.proof import Outcome
from gradaccum.core.rounding import last_place
from gradaccum.core.sizes import even_sizes
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import has_rows
from gradaccum.keras.batch_norm import BatchNorm

__all__ = ["Draws", "StepRunner", "as_array", "held", "outcome_of", "precision_of", "take_rows"]

_SMALL = 1e-2
"""Tensors that are smaller than the largest gradient by this factor are measured by that one: where a gradient is zero,
as that of the bias of attention's keys, all of it is rounding."""
NEARBY = 2
"""How often the weights are moved by one unit in the last place, to see what rounding makes of a result."""


class Draws:
    """What was drawn while random numbers were held.

    Attributes:
        held: Whether Keras' own functions were asked for random numbers.
        raw: Whether a `SeedGenerator` was asked for a seed by somebody else, whose random numbers can't be held.
    """

    held = False
    raw = False


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
    """Runs a training step of Keras for a proof.

    Args:
        step: The step, whose trials run.
        data: The batch that rows are of.
        batch_norm: What BatchNormalization does.
        tolerance: The largest relative error that is rounding.
        state: The values of the step's variables; None: as they are.
    """

    def __init__(self, step: Any, data: Any, batch_norm: BatchNorm, tolerance: float, state: Any = None) -> None:
        self._step, self._data, self._batch_norm, self._state = step, data, batch_norm, state
        self.tolerance, self.precision = tolerance, precision_of(step.model)
        self.draws = Draws()
        self.in_half = self.precision in ("bfloat16", "float16")
        self.reads: dict[int, Any] = {}
        """The variables that the rows at once have read."""

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None) -> Outcome:
        if sizes is not None:
            assert list(sizes) == even_sizes(len(rows), max(sizes))
            return self._run(rows, max(sizes), self._state)
        with private.recorded_reads() as read:
            found = self._run(rows, len(rows), self._state)
        self.reads.update(read)
        return found

    def _run(self, rows: Sequence[int], size: int, state: Any) -> Outcome:
        trial = self._step.trial(size, self._batch_norm)
        found = trial.outcome(take_rows(self._data, np.asarray(rows)), state)
        self.draws = trial.draws
        return found

    def nearby(self, rows: Sequence[int]) -> Iterator[Outcome]:
        weights, *others = self._state or self._step.state()
        for moved in self._nearby(weights):
            yield self._run(rows, len(rows), (moved, *others))

    def _nearby(self, weights: Sequence[Any]) -> Iterator[list[Any]]:
        """Weights that differ from these by a unit in the last place."""
        random, unit = np.random.default_rng(0), last_place(self.precision)

        def moved(value: Any) -> Any:
            if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
                return value
            signs = random.choice([-1.0, 1.0], tuple(value.shape))
            return value * ops.convert_to_tensor(1.0 + unit * signs, value.dtype)

        for _ in range(NEARBY):
            yield [moved(value) for value in weights]


def take_rows(data: Any, rows: np.ndarray) -> Any:
    """These rows of a batch."""
    take = backends.running().take_rows
    return tree.map_structure(lambda leaf: take(leaf, rows) if has_rows(leaf) else leaf, data)


def as_array(value: Any) -> np.ndarray:
    """A tensor as numbers, half precision in float32."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    return np.array(
        ops.convert_to_numpy(ops.cast(value, "float32") if "float" in dtype and "64" not in dtype else value)
    )


def precision_of(model: Any) -> str:
    """The narrowest dtype that a compiled model computes in."""
    dtypes = {variable.dtype for variable in model.trainable_variables}
    dtypes |= {layer.compute_dtype for layer in [model, *private.layers_in(model)] if layer.compute_dtype}
    dtypes |= {getattr(one.loss, "dtype", None) for one in private.loss_entries(private.compiled_losses(model))}
    if keras.backend.backend() != "tensorflow":  # `result_type` makes float32 of float64 in parts of losses and layers
        dtypes.add("float32")
    order = ["float64", "float32", "bfloat16", "float16"]
    return max((dtype for dtype in dtypes if dtype in order), key=order.index, default="float32")


# Random numbers that are the same for every row, so that whole batch and micro-batches can be compared.


@contextlib.contextmanager
def held() -> Iterator[Draws]:
    """While this is open, `keras.random` and Keras' layers draw the same for every row, always, and move no seed.

    Dropout drops the same features of every row, a sampling layer adds the same noise to each. `shuffle` leaves the
    order; gamma, beta and binomial distributions give their mean.
    """
    draws = Draws()
    module, own_next = private.random_functions(), keras.random.SeedGenerator.next
    own = {name: getattr(module, name) for name in (*_OF_SHAPES, *_OTHERS)}

    def following(generator: Any, *args: Any, **kwargs: Any) -> Any:
        draws.raw = True
        return own_next(generator, *args, **kwargs)

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
            draws.held = True
            return _OTHERS.get(name, _of_one_row)(function, *args, **kwargs)

        return draw

    for name, function in own.items():
        setattr(module, name, recording(name, function))
    keras.random.SeedGenerator.next = following
    try:
        yield draws
    finally:
        keras.random.SeedGenerator.next = own_next
        for name, function in own.items():
            setattr(module, name, function)


def _of_one_row(function: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any) -> Any:
    """What is drawn for one row, for all of them."""
    drawn = function((1, *tuple(shape)[1:]) if len(shape) else (), *args, seed=0, **kwargs)
    return ops.broadcast_to(drawn, tuple(shape))


def _dropout(function: Callable[..., Any], inputs: Any, rate: float, noise_shape: Any = None) -> Any:
    noise_shape = None if noise_shape is None else (1, *tuple(noise_shape)[1:])
    return inputs * function(ops.ones_like(inputs[:1]), rate, noise_shape, seed=0)


def _categorical(function: Callable[..., Any], logits: Any, num_samples: int, dtype: Any = "int32") -> Any:
    noise = np.random.default_rng(0).gumbel(size=(1, num_samples, int(logits.shape[-1])))
    return ops.cast(ops.argmax(logits[:, None, :] + ops.convert_to_tensor(noise, logits.dtype), axis=-1), dtype)


def _mean(function: Callable[..., Any], shape: Any, alpha: Any, beta: Any = None, dtype: Any = None) -> Any:
    """That of a gamma distribution, or with `beta` of a beta distribution."""
    mean = alpha if beta is None else alpha / (alpha + beta)
    return ops.broadcast_to(ops.cast(mean, dtype or keras.backend.floatx()), tuple(shape))


def _mean_count(function: Callable[..., Any], shape: Any, counts: Any, probabilities: Any, dtype: Any = None) -> Any:
    mean = ops.round(ops.cast(counts, "float32") * ops.cast(probabilities, "float32"))
    return ops.broadcast_to(ops.cast(mean, dtype or keras.backend.floatx()), tuple(shape))


_OF_SHAPES = ("normal", "randint", "truncated_normal", "uniform")
_OTHERS: dict[str, Callable[..., Any]] = {
    "beta": _mean,
    "binomial": _mean_count,
    "categorical": _categorical,
    "dropout": _dropout,
    "gamma": _mean,
    "shuffle": lambda function, x, axis=0: x,
}
