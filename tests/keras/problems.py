"""Small problems that the Keras tests share: models, rows, micro-batches, and custom loops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import gradaccum.keras
from tests.reference import keras_updates, ragged, relative_error, windows_of

BACKEND = keras.backend.backend()
Batch = tuple[np.ndarray, ...]
ACTIVITY = "l2" if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14) else None
"""An activity regulariser that is a mean over rows: before 3.14, Keras' are sums over them."""
SHAPES = [(4, 3), (3,), (3, 2)]
"""Of the variables that gradients are made up for."""


def slow(*values: Any) -> Any:
    """A case that repeats another's claim: on the backends that compile each one, for `make test-slow` alone."""
    return pytest.param(*values, marks=[] if BACKEND == "torch" else pytest.mark.slow)


def slow_where_compiled(test: Any) -> Any:
    """A test whose claim another one makes on this backend, or that is none about backends: as `slow`, all of it."""
    return test if BACKEND == "torch" else pytest.mark.slow(test)


def compiled_on(backend: str) -> Callable[[Any], Any]:
    """A test that PyTorch runs and one of the two that compile, the cheaper: the other repeats the claim slowly."""
    return lambda test: test if BACKEND in ("torch", backend) else pytest.mark.slow(test)


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


_SHARED: dict[str, tuple[keras.Model, list[Any]]] = {}


def compiled(model: keras.Model, optimizer: Any) -> keras.Model:
    """A model like this one, compiled, that tests share: with these weights, and an optimizer like this one, untouched.

    Compiling takes longest in these tests. So what isn't about compiling takes one that is compiled already.
    """
    parts = [*model.layers, optimizer]
    configs = [(type(part).__name__, {k: v for k, v in part.get_config().items() if k != "name"}) for part in parts]
    key = str((configs, keras.config.floatx(), keras.config.dtype_policy().name))
    if key not in _SHARED:
        model.compile(optimizer=optimizer, loss="mse", jit_compile=BACKEND == "jax")
        optimizer.build(model.trainable_variables)
        _SHARED[key] = model, [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
    shared, state = _SHARED[key]
    shared.set_weights(model.get_weights())
    for variable, value in zip(shared.optimizer.variables, state):
        variable.assign(value)
    return shared


def wrapped(inner: Any, steps: Any) -> keras.Model:
    """The network, compiled with an `Optimizer` around `inner`: shared, with a new window of these steps."""
    schedule = gradaccum.Schedule(steps)
    model = compiled(network(), gradaccum.keras.optimizers.Optimizer(inner, 1))
    model.optimizer.window.rule.schedule = schedule
    model.optimizer.window.plan(schedule())
    return model


def plain(model: keras.Model, optimizer: Any, micro_batches: list[Batch], steps: int, epochs: int) -> keras.Model:
    """The model after plain training on the large batches."""
    model = compiled(model, optimizer)
    keras_updates(model, [join(window) for window in windows_of(micro_batches, steps)] * epochs)
    return model


def updated(windows: Sequence[Sequence[Batch]], make: Callable[[], Any] = sgd) -> keras.Model:
    """The network after plain updates, one on the rows of each window."""
    model = compiled(network(), make())
    keras_updates(model, [join(window) for window in windows])
    return model


def fit(model: keras.Model, micro_batches: list[Batch], *callbacks: Any, **arguments: Any) -> keras.Model:
    """The model after `fit` on these micro-batches, with the GradientAccumulation callback first unless it is given."""
    ours = gradaccum.keras.callbacks.GradientAccumulation
    given = any(isinstance(callback, ours) for callback in callbacks)
    callbacks = callbacks if given else (ours(), *callbacks)
    model.fit(Batches(micro_batches), shuffle=False, verbose=0, callbacks=list(callbacks), **arguments)
    return model


def logged(caplog: Any) -> list[str]:
    """What gradaccum has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "gradaccum"]


def error(actual: keras.Model, expected: keras.Model) -> float:
    """The largest relative error of the weights."""
    return relative_error(actual.get_weights(), expected.get_weights())


def variables_like(shapes: Sequence[tuple[int, ...]], dtype: str | None = None, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    dtype = dtype or keras.backend.floatx()
    return [keras.Variable(generator.normal(size=shape), dtype=dtype, name=f"w{i}") for i, shape in enumerate(shapes)]


def _tensor(gradient: Any) -> Any:
    is_array = isinstance(gradient, np.ndarray)
    return keras.ops.convert_to_tensor(gradient, keras.backend.floatx()) if is_array else gradient


_STEPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The compiled steps of optimizers that are trained by hand."""


def train_by_hand(optimizer: Any, variables: list[Any], gradients: Sequence[Sequence[Any]], by: str = "") -> None:
    """Give the optimizer one list of gradients after the other, in the custom loop of the backend."""
    if not optimizer.built:
        optimizer.build(variables)
    tensors = [[None if g is None else _tensor(g) for g in some] for some in gradients]
    if by == "stateless" or (BACKEND == "jax" and by != "eager"):
        if optimizer not in _STEPS:
            _STEPS[optimizer] = optimizer.stateless_apply
            if BACKEND == "jax":
                import jax

                _STEPS[optimizer] = jax.jit(optimizer.stateless_apply)
        step = _STEPS[optimizer]
        weights, state = [v.value for v in variables], [v.value for v in optimizer.variables]
        for some in tensors:
            weights, state = step(state, some, weights)
        for variable, value in zip([*variables, *optimizer.variables], [*weights, *state]):
            variable.assign(value)
    elif BACKEND == "tensorflow" and by != "eager":
        import tensorflow as tf

        steps = _STEPS.setdefault(optimizer, {})
        for some in tensors:
            which = tuple(g is None for g in some)
            if which not in steps:
                steps[which] = tf.function(lambda some: optimizer.apply_gradients(zip(some, variables)))
            steps[which](some)
    else:
        for some in tensors:
            optimizer.apply(some, variables)


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
