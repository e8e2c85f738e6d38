"""Scenarios, run by the library and by plain Keras on the large batches."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import gradaccum.keras
from gradaccum.errors import NotEquivalentError, WindowError
from tests.keras.fuzz.graphs import mixes_rows, trained_graphs
from tests.keras.fuzz.scenario import Scenario
from tests.keras.problems import BACKEND, Batches, join
from tests.reference import keras_updates, windows_of


class _NotPlain(Exception):
    """Plain Keras can't run it."""


BOUND = 1e-10 if BACKEND == "tensorflow" else 1e-6
"""Keras' losses compute in float32 on the other two, whatever is set."""
OURS = (
    "micro_batched compares",
    "BatchNormalization normalises",
    "It could not be proven that the chunked",
    "These variables of the chunked",
)
"""Warnings of the library's that name what is not exact."""


def outcome(scenario: Scenario) -> str:
    """What is wrong with a run; empty where it is right; "refused: ..." where it is refused, or named in a warning."""
    run = {"wrapper": _wrapper, "micro_batched": _micro_batched}.get(scenario.kind, _graphs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            ours, expected = run(scenario)
        except (NotEquivalentError, WindowError) as error:
            mixes = scenario.kind == "wrapper" or (mixes_rows if run is _graphs else _mixes_rows)(scenario)
            return f"refused: {error}" if mixes else f"refused falsely: {error}"
        except _NotPlain:
            return ""
        except Exception as error:
            if run is _graphs and mixes_rows(scenario) and "can't cut Own" in str(error):
                return f"refused: {error}"
            return f"{type(error).__name__}: {error}"
    error = _error(ours, expected)
    if run is _graphs:
        error = max(error, *(float(np.abs(a - b).max()) for a, b in zip(ours.ends, expected.ends, strict=True)))
        return "" if error <= 1e-10 else f"off by {error:.1e}"
    if BOUND < error < 100 * BOUND and BACKEND != "tensorflow" and scenario.kind == "micro_batched":
        error = 0.0 if error < 10 * _rounding(scenario, expected) else error
    named = [str(one.message) for one in told if str(one.message).startswith(OURS)]
    if error <= BOUND:
        return ""
    return f"refused: {named[0]}" if named else f"off by {error:.1e}"


def _error(ours: keras.Model, expected: keras.Model) -> float:
    """The largest difference, relative to the tensor's own entries, or a hundredth of the largest of all."""
    pairs = list(zip(ours.get_weights(), expected.get_weights(), strict=True))
    floor = 0.01 * max(float(np.abs(b).max()) for _, b in pairs)
    return max(
        float(np.abs(a - b).max()) / max(float(np.abs(b).max()), floor) if np.isfinite(a - b).all() else np.inf
        for a, b in pairs
    )


def _rounding(scenario: Scenario, plain: keras.Model) -> float:
    """How far plain training moves with the same rows in another order: what float32 makes of their sums."""
    return _error(_trained(scenario, [_reversed(batch) for batch in _data(scenario)], lambda model: model)[0], plain)


def _reversed(batch: Any) -> Any:
    return keras.tree.map_structure(lambda rows: rows[::-1], batch)


def _optimizer(scenario: Scenario) -> Any:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    make: dict[str, Callable[[], Any]] = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
        "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        "schedule": lambda: keras.optimizers.SGD(rate),
        "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.05),
        "decayed": lambda: keras.optimizers.SGD(0.05, weight_decay=0.1),
    }
    return make[scenario.optimizer]()


def _compile(model: keras.Model, optimizer: Any, scenario: Scenario, **compiled: Any) -> keras.Model:
    how = {"run_eagerly": scenario.eager, "steps_per_execution": 1 if BACKEND == "torch" else scenario.per_execution}
    model.compile(optimizer=optimizer, jit_compile=BACKEND == "jax" and not scenario.eager, **how, **compiled)
    return model


# The wrapper.


class _Stop(keras.callbacks.Callback):
    """Ends `fit` with an error after so many micro-batches, and saves first if there is a path."""

    def __init__(self, after: int, path: str = "") -> None:
        super().__init__()
        self.after, self.path = after, path

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after -= 1
        if self.after == 0:
            if self.path:
                self.model.save(self.path)
            raise KeyboardInterrupt


def _network() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(2)])


def _wrapper(scenario: Scenario) -> tuple[keras.Model, keras.Model]:
    s, random = scenario, np.random.default_rng(scenario.seed)
    data = [(random.normal(size=(rows, 5)), random.normal(size=(rows, 2))) for rows in s.batches]
    model, inner = _network(), _optimizer(s)
    if s.sized:
        sizes = (s.batches[0], s.batches[0] * s.steps[0], sum(s.batches))
        _compile(model, gradaccum.keras.optimizers.BatchOptimizer(inner, *sizes, model), s, loss="mse")
        model.fit(*join(data), batch_size=s.batches[0], epochs=s.epochs, shuffle=False, verbose=0)
        return model, _plain(s, windows_of(data, s.steps[0]) * s.epochs)
    if s.scaled == "inside":
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    wrapped = optimizer = gradaccum.keras.optimizers.Optimizer(
        inner, s.steps[0] if len(s.steps) == 1 else dict(enumerate(s.steps))
    )
    if s.scaled == "outside":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    _compile(model, optimizer, s, loss="mse")

    def fit(batches: list[Any], first: int, last: int, *more: Any) -> None:
        callbacks = [gradaccum.keras.callbacks.GradientAccumulation()] if s.callback else []
        epochs = {"initial_epoch": first, "epochs": last}
        model.fit(Batches(batches), shuffle=False, verbose=0, callbacks=[*callbacks, *more], **epochs)

    def epochs_of(start: list[Any], first: int, last: int) -> list[Any]:
        """The windows of these epochs, of which the first one begins with other micro-batches."""
        if not s.callback:
            return windows_of(start + data * (last - first - 1), s.steps[0])
        return [w for e in range(first, last) for w in windows_of(data if e > first else start, _steps_of(s, e))]

    done, start, ends = list[Any](), data, windows_of(data[: s.at], s.steps[0])
    is_open = bool(ends) and len(ends[-1]) < s.steps[0]
    if s.event in ("save", "interrupt"):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras") if s.event == "save" else ""
            with pytest.raises(KeyboardInterrupt):
                fit(data, 0, s.epochs, _Stop(s.at, path))
            if path:
                model = keras.models.load_model(path)
        done = ends[:-1] if is_open else ends
        if path:
            fit(data[s.at :], 0, 1)
            if s.epochs > 1:
                fit(data, 1, s.epochs)
            return model, _plain(
                s, windows_of(data, s.steps[0]) + (epochs_of(data, 1, s.epochs) if s.epochs > 1 else [])
            )
    elif s.event in ("train_on_batch", "flush"):
        for batch in data[: s.at]:
            model.train_on_batch(*batch)
        done = ends
        if s.event == "flush":
            wrapped.flush()
        elif is_open:
            done, start = ends[:-1], ends[-1] + data
    fit(data, 0, s.epochs)
    return model, _plain(s, done + epochs_of(start, 0, s.epochs))


def _steps_of(scenario: Scenario, epoch: int) -> int:
    return scenario.steps[min(epoch, len(scenario.steps) - 1)]


def _plain(scenario: Scenario, windows: list[list[Any]]) -> keras.Model:
    model = _network()
    model.compile(optimizer=_optimizer(scenario), loss="mse", run_eagerly=BACKEND != "jax")
    keras_updates(model, [join(window) for window in windows])
    return model


# micro_batched.


@keras.saving.register_keras_serializable("fuzz")
class AddsLoss(layers.Layer):
    """Adds a term that is a mean over rows, or a sum."""

    def __init__(self, kind: str = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * (ops.mean if self.kind == "mean" else ops.sum)(ops.square(inputs)))
        return inputs

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"kind": self.kind}


def _squares(t: Any, p: Any) -> Any:
    return ops.mean(ops.square(p - ops.cast(t, p.dtype)), axis=-1)


@keras.saving.register_keras_serializable("fuzz")
def own(t: Any, p: Any) -> Any:
    """A value per row."""
    return _squares(t, p)


@keras.saving.register_keras_serializable("fuzz")
def scalar(t: Any, p: Any) -> Any:
    """The mean over rows."""
    return ops.mean(_squares(t, p))


@keras.saving.register_keras_serializable("fuzz")
def masked_mean(t: Any, p: Any) -> Any:
    """The mean over targets that aren't -1."""
    known = ops.cast(ops.not_equal(t, -1.0), p.dtype)
    return ops.sum(known * ops.square(p - ops.cast(t, p.dtype))) / ops.sum(known)


@keras.saving.register_keras_serializable("fuzz")
def variance(t: Any, p: Any) -> Any:
    """Looks at the spread of a batch's predictions."""
    return _squares(t, p) + 0.1 * ops.var(p)


@keras.saving.register_keras_serializable("fuzz")
class OverWeights(losses.Loss):
    """Divides by the sum of the sample weights."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        values = _squares(y_true, y_pred)
        if sample_weight is None:
            return ops.mean(values)
        weights = ops.reshape(ops.cast(sample_weight, values.dtype), (-1,))
        return ops.sum(weights * values) / ops.sum(ops.abs(weights))


def _loss(name: str, reduction: str) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "mse": lambda: losses.MeanSquaredError(reduction=reduction),
        "mae": lambda: losses.MeanAbsoluteError(reduction=reduction),
        "huber": lambda: losses.Huber(0.3, reduction=reduction),
        "sparse": lambda: losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
        "binary": lambda: losses.BinaryCrossentropy(from_logits=True, reduction=reduction),
        "own": lambda: own,
        "scalar": lambda: scalar,
        "dice": lambda: losses.Dice(),
        "masked mean": lambda: masked_mean,
        "over weights": lambda: OverWeights(),
        "variance": lambda: variance,
    }
    return kinds[name]()


def _mixes_rows(scenario: Scenario) -> bool:
    """Whether there is something to refuse."""
    across = {"dice", "variance", "masked mean", "over weights"} & set(scenario.losses)
    if scenario.tokens or scenario.weights not in ("", "ones"):
        across |= {"scalar"} & set(scenario.losses)  # a mean over rows, times weights or a mask
    mixing = {"softmax", "adds sum", *([] if _activity_is_a_mean() else ["active"])}
    return bool(across) or bool(mixing & set(scenario.layers))


@functools.cache
def _activity_is_a_mean() -> bool:
    """Whether what a layer adds for its outputs is a mean over rows; Keras 3.10 adds them up."""
    layer = layers.Activation("linear", activity_regularizer=keras.regularizers.L2(1.0))
    layer(np.ones((2, 1), "float32"))
    return float(layer.losses[0]) == 1.0


def _model(s: Scenario) -> keras.Model:
    keras.utils.set_random_seed(s.seed % 1000)
    inputs = keras.Input((4,), dtype="int32") if s.tokens else keras.Input((5,))
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs) if s.tokens else inputs
    hidden = layers.Dense(4, activation="tanh")(hidden)
    for kind in s.layers:
        make: dict[str, Callable[[], Any]] = {
            "dense": lambda: layers.Dense(4, activation="tanh"),
            "layer norm": lambda: layers.LayerNormalization(),
            "regularised": lambda: layers.Dense(4, kernel_regularizer="l2"),
            "active": lambda: layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.01)),
            "adds mean": lambda: AddsLoss("mean"),
            "adds sum": lambda: AddsLoss("sum"),
            "softmax": lambda: layers.Softmax(axis=0),
        }
        hidden = make[kind]()(hidden)
    if s.norm:
        hidden = layers.BatchNormalization(trainable=s.norm != "frozen")(hidden)
    outputs = [layers.Dense(3, name=f"out{i}")(hidden) for i, _ in enumerate(s.losses)]
    return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])


def _batch(s: Scenario, random: np.random.Generator, rows: int, last: bool) -> tuple[Any, ...]:
    x = random.integers(0, 9, (rows, 4)) if s.tokens else random.normal(size=(rows, 5))
    if s.tokens:
        x[:, 0] = 1 + x[:, 0] % 8
    places = (rows, 4) if s.tokens else (rows,)
    targets, weights = [], []
    for name in s.losses:
        classes = random.integers(0, 3, places)
        y: Any = random.normal(size=(*places, 3))
        if name in ("binary", "dice"):
            y = np.eye(3)[classes]
        if name == "masked mean" and (s.missing == "early" or (s.missing == "late" and last)):
            y[random.random(y.shape) < 0.3] = -1.0
        targets.append(classes if name == "sparse" else y)
        weight = random.uniform(0.5, 2, rows)
        if s.weights == "zeros":
            weight[random.random(rows) < 0.4] = 0
        if s.weights == "signed":
            weight[random.random(rows) < 0.3] *= -1
        if s.weights == "ones" or (s.weights == "late" and not last):
            weight[:] = 1
        weights.append(weight)
    one = len(targets) == 1
    batch = (x, targets[0] if one else targets)
    return batch if not s.weights else (*batch, weights[0] if one else weights)


def _graphs(s: Scenario) -> tuple[keras.Model, keras.Model]:
    from keras.src.backend.common import dtypes

    def compiled(model: Any, **how: Any) -> Any:
        return _compile(model, _optimizer(s), dataclasses.replace(s, per_execution=1), **how)

    with pytest.MonkeyPatch.context() as patch:  # Keras computes its losses in float64 on JAX and PyTorch, too
        patch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
        try:
            plain, train = trained_graphs(s, compiled)
        except Exception as error:
            raise _NotPlain from error
        return train(), plain


def _data(s: Scenario) -> list[tuple[Any, ...]]:
    random = np.random.default_rng(s.seed)
    return [_batch(s, random, rows, i == len(s.batches) - 1) for i, rows in enumerate(s.batches)]


def _micro_batched(s: Scenario) -> tuple[keras.Model, keras.Model]:
    data = _data(s)
    try:
        plain, history = _trained(s, data, lambda model: model)
    except Exception as error:
        raise _NotPlain from error
    ours, own_history = _trained(s, data, lambda model: gradaccum.keras.micro_batched(model, s.micro))
    for name, values in history.items():
        if (
            not np.allclose(values, own_history[name], rtol=max(BOUND, 1e-5), atol=1e-6)
            and _error(ours, plain) <= BOUND
        ):
            raise AssertionError(f"history[{name!r}] is {own_history[name]}, plain fit's is {values}")
    return ours, plain


def _trained(s: Scenario, data: list[Any], micro_batched: Callable[[Any], Any]) -> tuple[keras.Model, dict[str, Any]]:
    def compiled() -> dict[str, Any]:  # a loss keeps what it was built for
        some = [_loss(name, s.reduction) for name in s.losses]
        metrics = [["mae"] for _ in s.losses] if s.metrics and "sparse" not in s.losses else None
        return {"loss": some if len(some) > 1 else some[0], "weighted_metrics": metrics}

    model = _compile(micro_batched(_model(s)), _optimizer(s), s, **compiled())
    for batch in data[: s.at if s.event else 0]:
        model.train_on_batch(*batch)
    if s.event == "save":
        with tempfile.TemporaryDirectory() as folder:
            model.save(str(Path(folder) / "model.keras"))
            model = micro_batched(keras.models.load_model(str(Path(folder) / "model.keras")))
    elif s.event == "recompile":
        _compile(model, _optimizer(s), s, **compiled())
    return model, model.fit(Batches(data), epochs=s.epochs, shuffle=False, verbose=0).history
