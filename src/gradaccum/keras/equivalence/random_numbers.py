"""Random numbers that are the same for every row, so that whole batch and micro-batches can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from gradaccum.keras.private import random_functions

__all__ = ["Draws", "held"]


class Draws:
    """What was drawn while random numbers were held.

    Attributes:
        held: Whether Keras' own functions were asked for random numbers.
        raw: Whether a `SeedGenerator` was asked for a seed by somebody else, whose random numbers can't be held.
    """

    held = False
    raw = False


@contextlib.contextmanager
def held() -> Iterator[Draws]:
    """While this is open, `keras.random` and Keras' layers draw the same for every row, always, and move no seed.

    Dropout drops the same features of every row, a sampling layer adds the same noise to each. `shuffle` leaves the
    order; gamma, beta and binomial distributions give their mean.
    """
    draws = Draws()
    module, own_next = random_functions(), keras.random.SeedGenerator.next
    own = {name: getattr(module, name) for name in _HELD}

    def following(generator: Any, *args: Any, **kwargs: Any) -> Any:
        draws.raw = True
        return own_next(generator, *args, **kwargs)

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            draws.held = True
            return function(*args, **kwargs)

        return draw

    for name, function in _HELD.items():
        setattr(module, name, recording(function))
    keras.random.SeedGenerator.next = following
    try:
        yield draws
    finally:
        keras.random.SeedGenerator.next = own_next
        for name, function in own.items():
            setattr(module, name, function)


def _row(shape: Any, draw: Callable[..., Any]) -> np.ndarray:
    """The numbers of one row."""
    return np.asarray(draw(tuple(int(size) for size in tuple(shape)[1:])))


def _for_rows(row: np.ndarray, shape: Any, dtype: Any) -> Any:
    values = ops.convert_to_tensor(row, dtype or keras.backend.floatx())
    return values if len(shape) == 0 else ops.broadcast_to(values[None], tuple(shape))


def _uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    values = _for_rows(_row(shape, np.random.default_rng(0).random), shape, dtype)
    low, high = (ops.cast(bound, values.dtype) for bound in (minval, maxval))
    return low + (high - low) * values


def _randint(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
    return ops.cast(ops.floor(_uniform(shape, minval, maxval)), dtype)


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return mean + stddev * _for_rows(_row(shape, np.random.default_rng(0).standard_normal), shape, dtype)


def _truncated_normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    row = _row(shape, np.random.default_rng(0).standard_normal)
    return mean + stddev * _for_rows(np.clip(row, -2, 2), shape, dtype)


def _categorical(logits: Any, num_samples: int, dtype: Any = "int32", seed: Any = None) -> Any:
    noise = np.random.default_rng(0).gumbel(size=(1, num_samples, int(logits.shape[-1])))
    return ops.cast(ops.argmax(logits[:, None, :] + ops.convert_to_tensor(noise, logits.dtype), axis=-1), dtype)


def _dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    shape = tuple(inputs.shape) if noise_shape is None else tuple(noise_shape)
    shape = tuple(known if size is None else size for size, known in zip(shape, inputs.shape))
    if any(size is None for size in shape[1:]):  # only the shapes of the outputs are wanted
        return inputs
    kept = _row(shape, np.random.default_rng(0).random) >= rate
    return ops.where(ops.convert_to_tensor(kept)[None], inputs / max(1.0 - rate, 1e-7), ops.zeros_like(inputs))


def _shuffle(x: Any, axis: int = 0, seed: Any = None) -> Any:
    return x


def _gamma(shape: Any, alpha: Any, dtype: Any = None, seed: Any = None) -> Any:
    return ops.broadcast_to(ops.cast(alpha, dtype or keras.backend.floatx()), tuple(shape))


def _binomial(shape: Any, counts: Any, probabilities: Any, dtype: Any = None, seed: Any = None) -> Any:
    mean = ops.round(ops.cast(counts, "float32") * ops.cast(probabilities, "float32"))
    return ops.broadcast_to(ops.cast(mean, dtype or keras.backend.floatx()), tuple(shape))


def _beta(shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None) -> Any:
    alpha, beta = (ops.cast(number, dtype or keras.backend.floatx()) for number in (alpha, beta))
    return ops.broadcast_to(alpha / (alpha + beta), tuple(shape))


_HELD: dict[str, Callable[..., Any]] = {
    "beta": _beta,
    "binomial": _binomial,
    "categorical": _categorical,
    "dropout": _dropout,
    "gamma": _gamma,
    "normal": _normal,
    "randint": _randint,
    "shuffle": _shuffle,
    "truncated_normal": _truncated_normal,
    "uniform": _uniform,
}
