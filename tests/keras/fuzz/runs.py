"""Scenarios, run by the library and by plain Keras on the large batches."""

from __future__ import annotations

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
from keras.src.backend.common import dtypes

import gradaccum.keras
from gradaccum.errors import NotEquivalentError, WindowError
from tests.keras.fuzz.scenario import Scenario
from tests.keras.loops import ends
from tests.keras.marks import BACKEND
from tests.keras.problems import AddsLoss, Batches, join, network
from tests.keras.train_step.cases import OverWeights, squares
from tests.reference import keras_updates, windows_of


class _NotPlain(Exception):
    """Plain Keras can't run it."""


BOUND = 1e-10
OURS = "micro_batched compares", "BatchNormalization normalises"
"""Warnings of the library's that name what is not exact."""


def outcome(scenario: Scenario) -> str:
    """What is wrong with a run; empty where it is right; "refused: ..." where it is refused, or named in a warning.

    "no oracle: ..." where plain Keras can't run it.
    """
    wrapper = scenario.kind == "wrapper"
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        # Keras computes its losses in float64 on JAX and PyTorch, too.
        patch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
        try:
            ours, expected = (_wrapper if wrapper else _split)(scenario)
        except (NotEquivalentError, WindowError) as error:
            return f"refused: {error}" if wrapper or _mixes_rows(scenario) else f"refused falsely: {error}"
        except _NotPlain as error:
            return f"no oracle: {error.__cause__}"
        except Exception as error:
            is_refused = not wrapper and _mixes_rows(scenario) and "can't cut Own" in str(error)
            return f"refused: {error}" if is_refused else f"{type(error).__name__}: {error}"
    named = [str(one.message) for one in told if str(one.message).startswith(OURS)]
    if (error := _error(ours, expected)) <= BOUND:
        return ""
    is_named = named and (_mixes_rows(scenario) or not scenario.layered)
    return f"refused: {named[0]}" if is_named else f"off by {error:.1e}"


def _error(ours: list[Any], expected: list[Any]) -> float:
    """The largest difference, relative to the tensor's own entries, or a hundredth of the largest of all."""
    pairs = list(zip(ours, expected, strict=True))
    floor = 0.01 * max(float(np.abs(b).max()) for _, b in pairs)
    return max(
        float(np.abs(a - b).max()) / max(float(np.abs(b).max()), floor) if np.isfinite(a - b).all() else np.inf
        for a, b in pairs
    )


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
    by_xla = (BACKEND == "jax") is not scenario.otherwise
    model.compile(optimizer=optimizer, jit_compile=by_xla and not scenario.eager, **how, **compiled)
    return model


# The wrapper.


def _wrapper(s: Scenario) -> tuple[list[Any], list[Any]]:
    random = np.random.default_rng(s.seed)
    data = [(random.normal(size=(rows, 5)), random.normal(size=(rows, 3))) for rows in s.batches]
    model, inner = network(), _optimizer(s)
    if s.sized:
        rows = s.batches[0]
        sizes = (rows, rows * s.steps[0] - s.seed % rows, sum(s.batches))  # rounded up to the micro-batches of a window
        _compile(model, gradaccum.keras.optimizers.BatchOptimizer(inner, *sizes, model), s, loss="mse")
        model.fit(*join(data), batch_size=s.batches[0], epochs=s.epochs, shuffle=False, verbose=0)
        return model.get_weights(), _plain(s, windows_of(data, s.steps[0]) * s.epochs)
    if s.scaled == "inside":
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    steps = s.steps[0] if len(s.steps) == 1 else dict(enumerate(s.steps))
    wrapped = optimizer = gradaccum.keras.optimizers.Optimizer(inner, steps)
    if s.scaled == "outside":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    _compile(model, optimizer, s, loss="mse")

    def train(batches: list[Any], first: int, last: int, *more: Any) -> None:
        if first < last:
            callbacks = [gradaccum.keras.callbacks.GradientAccumulation()] if s.callback else []
            epochs = {"initial_epoch": first, "epochs": last}
            model.fit(Batches(batches), shuffle=False, verbose=0, callbacks=[*callbacks, *more], **epochs)

    def epochs_of(start: list[Any], first: int, last: int) -> list[Any]:
        """The windows of these epochs, of which the first one begins with other micro-batches."""
        if not s.callback:
            return windows_of(start + data * (last - first - 1), s.steps[0])
        steps = [s.steps[min(epoch, len(s.steps) - 1)] for epoch in range(first, last)]
        return [w for number, of_epoch in enumerate(steps) for w in windows_of(data if number else start, of_epoch)]

    done, start, held = list[Any](), data, windows_of(data[: s.at], s.steps[0])
    whole = held[:-1] if len(held[-1]) < s.steps[0] else held
    if s.event == "save":
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            with pytest.raises(KeyboardInterrupt):
                train(data, 0, s.epochs, ends(s.at, path=path))
            model = keras.models.load_model(path)
        train(data[s.at :], 0, 1)
        train(data, 1, s.epochs)
        later = epochs_of(data, 1, s.epochs) if s.epochs > 1 else []
        return model.get_weights(), _plain(s, windows_of(data, s.steps[0]), later)
    if s.event == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            train(data, 0, s.epochs, ends(s.at))
        done = held if s.at == len(data) else whole  # the callback has closed an epoch's last window
    elif s.event in ("train_on_batch", "flush"):
        for batch in data[: s.at]:
            model.train_on_batch(*batch)
        done = held
        if s.event == "flush":
            wrapped.flush()
        elif whole is not held:
            done, start = whole, held[-1] + data
    train(data, 0, s.epochs)
    epochs = epochs_of(start, 0, s.epochs)
    # On JAX a fit() that is interrupted ends as any other, with averages in the place of the weights.
    ends_twice = s.event == "interrupt" and BACKEND == "jax"
    return model.get_weights(), _plain(s, *([done, epochs] if ends_twice else [done + epochs]))


def _plain(scenario: Scenario, *fits: list[list[Any]]) -> list[Any]:
    """The weights after these windows, in so many fits."""
    model = network()
    model.compile(optimizer=_optimizer(scenario), loss="mse", run_eagerly=BACKEND != "jax")
    for windows in filter(None, fits):
        keras_updates(model, [join(window) for window in windows])
        model.set_weights(model.get_weights())  # on JAX they would be the averages' own arrays
    return model.get_weights()


# Large batches: micro_batched, or a model or a tower of it chunked.

STEPS, SIZE = 4, 4
"""Of what goes from layer to layer: (rows, steps, size)."""


class Own(layers.Layer):
    """A user's own: a weight, a counter, and another layer; or one that looks across rows."""

    def __init__(self, across: str = "") -> None:
        super().__init__()
        self.across, self.inside = across, layers.Dense(SIZE, activation="tanh")
        self.norm = layers.BatchNormalization() if across == "norm" else None

    def build(self, shape: Any) -> None:
        self.inside.build(shape)
        if self.norm is not None:
            self.norm.build(shape)
        self.scale = self.add_weight(shape=(SIZE,), initializer="ones", name="scale")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x: Any, training: Any = None) -> Any:
        if training:
            self.count.assign(self.count + 1.0)
        h = self.inside(x) * self.scale
        if self.across == "mean":
            h = h - ops.mean(h, axis=0, keepdims=True)
        return h if self.norm is None else self.norm(h, training=training)


def _mixes_rows(s: Scenario) -> bool:
    """Whether there is something to refuse."""
    across = {"softmax", "own mean", "own norm", "adds sum", *([] if _activity_is_a_mean() else ["active"])}
    if s.kind != "micro_batched":
        return bool(across & set(s.layers))
    looking = {"dice", "variance", "masked mean", "over weights"}
    return bool(looking & set(s.losses) or across & set(s.layers))


@functools.cache
def _activity_is_a_mean() -> bool:
    """Whether what a layer adds for its outputs is a mean over rows; Keras 3.10 adds them up."""
    layer = layers.Activation("linear", activity_regularizer=keras.regularizers.L2(1.0))
    layer(np.ones((2, 1), "float32"))
    return float(layer.losses[0]) == 1.0


def _norm(**options: Any) -> Any:
    return layers.BatchNormalization(momentum=0.8, beta_initializer="ones", **options)


def _nested() -> Any:
    return keras.Sequential([layers.Dense(SIZE, use_bias=False), _norm(), layers.Activation("tanh")])


def _graph(s: Scenario, hidden: Any) -> Any:
    shared, before = _norm(), hidden
    dense: Callable[..., Any] = lambda **options: layers.Dense(SIZE, activation="tanh", **options)  # noqa: E731
    make: dict[str, Callable[[Any], Any]] = {
        "dense": lambda h: dense(kernel_regularizer="l2")(h),
        "active": lambda h: layers.Dense(SIZE, activity_regularizer=keras.regularizers.L2(0.01))(h),
        "adds mean": lambda h: AddsLoss("mean")(h),
        "adds sum": lambda h: AddsLoss("sum")(h),
        "layer norm": lambda h: layers.LayerNormalization()(h),
        "group norm": lambda h: layers.GroupNormalization(2)(h),
        "conv": lambda h: layers.Conv1D(SIZE, 3, padding="same", activation="tanh")(h),
        "gru": lambda h: layers.GRU(SIZE, return_sequences=True)(h),
        # Asked for its scores, or JAX computes their softmax in float32 whatever is set.
        "attention": lambda h: layers.MultiHeadAttention(2, 3)(h, h, return_attention_scores=True)[0],
        "distributed": lambda h: layers.TimeDistributed(dense())(h),
        "residual": lambda h: layers.Add()([h, before]),
        "own": lambda h: Own()(h),
        "own mean": lambda h: Own("mean")(h),
        "own norm": lambda h: Own("norm")(h),
        "softmax": lambda h: layers.Softmax(axis=0)(h),
        "norm": lambda h: _norm(scale=False)(h),
        "norm by a mask": lambda h: _norm()(h, mask=h[..., 0] > -0.5),
        "norm of steps": lambda h: _norm(axis=1)(h),
        "frozen norm": lambda h: _norm(trainable=False)(h),
        "shared norm": lambda h: shared(dense()(h)),
        "norm and branch": lambda h: layers.Concatenate()([_norm()(h)[..., :2], ops.tanh(h)[..., 2:]]),
        "nested": lambda h: (_nested() if s.kind == "exact" else keras.Sequential([dense(), dense()]))(h),
        "twice": lambda h: (lambda model: model(h) + model(h * 0.5))(_nested()),
    }
    for kind in s.layers:
        hidden, before = make[kind](hidden), hidden
    return hidden


def _model(s: Scenario, wrap: Callable[[Any], Any]) -> Any:
    keras.utils.set_random_seed(s.seed % 1000)
    shape, dtype = ((STEPS,), "int32") if s.tokens else ((STEPS, 3), None)
    outer, inner = layers.Input(shape, dtype=dtype), layers.Input(shape, dtype=dtype)
    if s.tokens:
        # On TensorFlow plain `fit` clips the gradient of each occurrence of a row, if nothing else adds to it.
        regularizer = "l2" if s.optimizer == "clipped" else None
        hidden = layers.Embedding(9, SIZE, mask_zero=s.masked, embeddings_regularizer=regularizer)(inner)
    else:
        hidden = layers.Dense(SIZE, activation="tanh")(layers.Masking()(inner) if s.masked else inner)
    hidden = _graph(s, hidden)
    if not s.per_step:
        hidden = layers.GlobalAveragePooling1D()(hidden)
    if s.whole:
        outputs = [layers.Dense(3, name=f"out{i}")(hidden) for i, _ in enumerate(s.losses)]
        return wrap(keras.Model(inner, outputs if len(outputs) > 1 else outputs[0]))
    tower = wrap(keras.Model(inner, layers.Dense(SIZE)(hidden)))
    return keras.Model(outer, layers.Dense(3)(layers.Activation("tanh")(tower(outer))))


@keras.saving.register_keras_serializable("fuzz")
def own(t: Any, p: Any) -> Any:
    """A value per row."""
    return squares(t, p)


@keras.saving.register_keras_serializable("fuzz")
def scalar(t: Any, p: Any) -> Any:
    """The mean over rows."""
    return ops.mean(squares(t, p))


@keras.saving.register_keras_serializable("fuzz")
def masked_mean(t: Any, p: Any) -> Any:
    """The mean over targets that aren't -1."""
    known = ops.cast(ops.not_equal(t, -1.0), p.dtype)
    return ops.sum(known * ops.square(p - ops.cast(t, p.dtype))) / ops.sum(known)


@keras.saving.register_keras_serializable("fuzz")
def variance(t: Any, p: Any) -> Any:
    """Looks at the spread of a batch's predictions."""
    return squares(t, p) + 0.1 * ops.var(p)


def across(t: Any, p: Any) -> Any:
    """Compares each row with all others."""
    return ops.logsumexp(0.3 * ops.matmul(p, ops.transpose(p))) + scalar(t, p)


def _loss(name: str, reduction: str) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "mse": lambda: losses.MeanSquaredError(reduction=reduction),
        "mae": lambda: losses.MeanAbsoluteError(reduction=reduction),
        "huber": lambda: losses.Huber(0.3, reduction=reduction),
        "sparse": lambda: losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
        "binary": lambda: losses.BinaryCrossentropy(from_logits=True, reduction=reduction),
        "dice": losses.Dice,
        "over weights": OverWeights,
    }
    functions = {"own": own, "scalar": scalar, "masked mean": masked_mean, "variance": variance, "across": across}
    return kinds[name]() if name in kinds else functions[name]


def _batch(s: Scenario, random: np.random.Generator, rows: int, number: int) -> tuple[Any, ...]:
    last, update = number == len(s.batches), number + (s.at if s.event == "train_on_batch" else 0)
    proven = update & (update - 1) == 0  # what comes in others is silent until the next proof
    x = random.integers(0, 9, (rows, STEPS)) if s.tokens else random.normal(size=(rows, STEPS, 3))
    if s.tokens:
        x[:, 0] = 1 + x[:, 0] % 8
    elif s.masked:
        x[:, 1:] *= random.random((rows, STEPS - 1, 1)) < 0.7
    places = (rows, STEPS) if s.per_step else (rows,)
    targets, weights = [], []
    for name in s.losses:
        classes = random.integers(0, 3, places)
        y: Any = np.eye(3)[classes] if name in ("binary", "dice") else random.normal(size=(*places, 3))
        if name == "masked mean" and (s.missing == "early" or (s.missing == "late" and last and proven)):
            y[random.random(y.shape) < 0.3] = -1.0
        targets.append(classes if name == "sparse" else y)
        weight = random.uniform(0.5, 2, rows)
        if s.weights == "zeros":
            weight[random.random(rows) < 0.4] = 0
        if s.weights == "signed":
            weight[random.random(rows) < 0.3] *= -1
        if s.weights == "ones" or (s.weights == "late" and not last):
            weight[:] = 1
        weights.append(np.repeat(weight[:, None], STEPS, axis=1) if s.per_step else weight)
    batch = (x, tuple(targets), tuple(weights)) if s.weights else (x, tuple(targets))  # TensorFlow takes no lists
    return batch if len(targets) > 1 else (x, *(part[0] for part in batch[1:]))


def _wrap(s: Scenario, part: Any) -> Any:
    exact = {"batch_norm": "exact"} if s.kind == "exact" else {}
    if s.kind == "micro_batched" or (exact and s.whole):
        return gradaccum.keras.micro_batched(part, s.micro, **exact)
    return gradaccum.keras.chunked(part, s.micro, keep=s.keep, **exact)


def _split(s: Scenario) -> tuple[list[Any], list[Any]]:
    random = np.random.default_rng(s.seed)
    data = [_batch(s, random, rows, number) for number, rows in enumerate(s.batches, 1)]
    try:
        plain, history = _trained(s, data, lambda part: part)
    except Exception as error:
        raise _NotPlain from error
    ours, own_history = _trained(s, data, functools.partial(_wrap, s))
    for name, values in history.items():
        same = np.allclose(values, own_history[name], rtol=1e-5, atol=1e-6)
        # On PyTorch, plain `fit` multiplies the weights that metrics see by the loss' mask, in place.
        edited = BACKEND == "torch" and name.endswith("mae") and s.masked and s.weights
        averaged = (
            BACKEND == "tensorflow" and name.startswith("out") and name.endswith("_loss")
        )  # over batches, in plain
        if not (same or edited or averaged) and _error(ours, plain) <= BOUND:
            raise AssertionError(f"history[{name!r}] is {own_history[name]}, plain fit's is {values}")
    return ours, plain


def _trained(s: Scenario, data: list[Any], wrap: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Weights, and where chunks come to outputs these too; and the logs."""

    def compiled(model: Any) -> Any:
        some = [_loss(name, s.reduction) for name in s.losses]  # anew: a loss keeps what it was built for
        metrics = [["mae"] for _ in s.losses] if s.metrics and "sparse" not in s.losses else None
        return _compile(model, _optimizer(s), s, loss=some if len(some) > 1 else some[0], weighted_metrics=metrics)

    model = compiled(_model(s, wrap))
    for batch in data[: s.at if s.event else 0]:
        model.train_on_batch(*batch)
    if s.event == "save":
        with tempfile.TemporaryDirectory() as folder:
            model.save(str(Path(folder) / "model.keras"))
            model = wrap(keras.models.load_model(str(Path(folder) / "model.keras")))
    elif s.event == "recompile":
        compiled(model)
    history = model.fit(Batches(data), epochs=s.epochs, shuffle=False, verbose=0).history
    first = data[0][0] if s.layered else None
    outputs = [model(first, training=False), model.predict(first, verbose=0)] if s.layered else []
    return [*model.get_weights(), *map(ops.convert_to_numpy, outputs)], history
