"""Training the problems: in `fit`, by hand, and plainly on the large batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import gradaccum.keras
from tests.keras.marks import BACKEND
from tests.keras.problems import Batch, Batches, join, network, sgd
from tests.reference import keras_updates, relative_error

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


def updated(windows: Sequence[Sequence[Batch]], make: Callable[[], Any] = sgd) -> keras.Model:
    """The network after plain updates, one on the rows of each window."""
    model = compiled(network(), make())
    keras_updates(model, [join(window) for window in windows])
    return model


def assert_updates(model: keras.Model, windows: Sequence[Any], bound: float, make: Callable[[], Any] = sgd) -> None:
    """This network has made these updates and no others."""
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == len(windows)
    assert error(model, updated(windows, make)) <= bound


def callback(event: str, function: Callable[[Any, int], Any]) -> Any:
    """One that calls `function(model, number)` at this event."""
    made = keras.callbacks.LambdaCallback(**{event: lambda number, logs=None: function(made.model, number)})
    return made


def ends(after: int, by: type[BaseException] = KeyboardInterrupt, path: str = "") -> Any:
    """Ends `fit` by an error after so many micro-batches of an epoch, and saves the model before if it has a path."""

    def end(model: Any, batch: int) -> None:
        if batch + 1 == after:
            if path:
                model.save(path)
            raise by

    return callback("on_train_batch_end", end)


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


# Gradients that are made up.

SHAPES = [(4, 3), (3,), (3, 2)]
"""Of the variables that gradients are made up for."""


def variables_like(shapes: Sequence[tuple[int, ...]], dtype: str | None = None, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    dtype = dtype or keras.backend.floatx()
    return [keras.Variable(generator.normal(size=shape), dtype=dtype, name=f"w{i}") for i, shape in enumerate(shapes)]


def micro_gradients(count, seed=2):
    generator = np.random.default_rng(seed)
    return [[generator.normal(size=shape) for shape in SHAPES] for _ in range(count)]


def means(gradients, steps):
    windows = [gradients[start : start + steps] for start in range(0, len(gradients), steps)]
    return [[np.mean([g[i] for g in window], axis=0) for i in range(len(SHAPES))] for window in windows]
