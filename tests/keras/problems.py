"""Small problems that the Keras tests share: models, rows, micro-batches, optimizers and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tests.reference import ragged

Batch = tuple[np.ndarray, ...]
ACTIVITY = "l2" if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14) else None
"""An activity regulariser that is a mean over rows: before 3.14, Keras' are sums over them."""
SHAPES = [(4, 3), (3,), (3, 2)]
"""Of the variables that gradients are made up for."""


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


def variables_like(shapes: Sequence[tuple[int, ...]], dtype: str | None = None, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    dtype = dtype or keras.backend.floatx()
    return [keras.Variable(generator.normal(size=shape), dtype=dtype, name=f"w{i}") for i, shape in enumerate(shapes)]


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


def micro_gradients(count, seed=2):
    generator = np.random.default_rng(seed)
    return [[generator.normal(size=shape) for shape in SHAPES] for _ in range(count)]


def means(gradients, steps):
    windows = [gradients[start : start + steps] for start in range(0, len(gradients), steps)]
    return [[np.mean([g[i] for g in window], axis=0) for i in range(len(SHAPES))] for window in windows]
