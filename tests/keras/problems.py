"""Small problems that the Keras tests share: models, rows, micro-batches, optimizers and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tests.reference import ragged

Batch = tuple[np.ndarray, ...]
ACTIVITY = "l2" if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14) else None
"""An activity regulariser that is a mean over rows: before 3.14, Keras' are sums over them."""


def network(seed: int = 0, **hidden: Any) -> keras.Model:
    """5 -> 7 -> 3; tanh, so that every gradient is of ordinary size."""
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(7, activation="tanh", **hidden), keras.layers.Dense(3)]
    return keras.Sequential(layers)


def regression(rows: int, seed: int = 1) -> Batch:
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(rows, 5)), generator.normal(size=(rows, 3))
    return x.astype(keras.backend.floatx()), y.astype(keras.backend.floatx())


def split(data: Batch, sizes: Sequence[int]) -> list[Batch]:
    return [tuple(array[rows] for array in data) for rows in ragged(len(data[0]), sizes)]


def join(window: Sequence[Batch]) -> Batch:
    return tuple(np.concatenate(parts) for parts in zip(*window))


class Batches(keras.utils.PyDataset):
    """These batches, in this order, in every epoch."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


@keras.saving.register_keras_serializable("tests")
class HeavyBall(keras.optimizers.Optimizer):
    """A user's own optimizer, as Keras' documentation tells to write one."""

    def __init__(self, learning_rate=0.1, momentum=0.9, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = momentum

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(v, name="velocity") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        velocity = self.velocities[self._get_variable_index(variable)]
        learning_rate = keras.ops.cast(learning_rate, variable.dtype)
        gradient = keras.ops.cast(gradient, variable.dtype)
        self.assign(velocity, velocity * self.momentum - gradient * learning_rate)
        self.assign_add(variable, velocity)

    def get_config(self):
        return super().get_config() | {"momentum": self.momentum}


class Does(keras.layers.Layer):
    """What this function does: only numbers tell that some look across rows."""

    def __init__(self, function: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call(self, x, training=None):
        return self.function(x)


@keras.saving.register_keras_serializable("tests")
class AddsLoss(keras.layers.Layer):
    """Adds a term that is a mean over rows, or a sum."""

    def __init__(self, kind: str = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, inputs):
        self.add_loss(0.1 * (keras.ops.mean if self.kind == "mean" else keras.ops.sum)(keras.ops.square(inputs)))
        return inputs

    def get_config(self):
        return super().get_config() | {"kind": self.kind}


class Traced(keras.layers.Dense):
    """Counts how often Python runs through it: where a step is compiled, while that is traced."""

    runs = 0

    def call(self, inputs):
        Traced.runs += 1
        return super().call(inputs)
