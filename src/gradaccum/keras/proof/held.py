"""Random numbers that are the same for every row, so that whole batch and micro-batches can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from gradaccum.keras import private


class Draws:
    """What was drawn while random numbers were held."""

    held = False  # Keras' own functions were asked for random numbers
    raw = False  # a `SeedGenerator` was asked for a seed for others, which can't be held


@contextlib.contextmanager
def held() -> Iterator[Draws]:
    """While this is open, `keras.random` and Keras' layers draw the same for every row, always, and move no seed.

    Dropout drops the same features of every row, a sampling layer adds the same noise to each, `shuffle` leaves the
    order. Other distributions (beta, binomial, categorical, gamma) can't be held so.
    """
    draws, module, own_next = Draws(), private.random_functions(), keras.random.SeedGenerator.next
    own = {name: getattr(module, name) for name in _HELD}

    def following(generator: Any, *args: Any, **kwargs: Any) -> Any:
        draws.raw = True
        return own_next(generator, *args, **kwargs)

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
            draws.held = True
            return _HELD[name](function, *args, **kwargs)

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


_HELD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["normal", "randint", "truncated_normal", "uniform"], _of_one_row),
    "dropout": _dropout,
    "shuffle": lambda function, x, axis=0: x,
}
"""What stands in for each of the backend's random functions."""
