"""Random functional models, whole or a tower of them chunked, against the same without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import gradaccum.keras
from tests.keras.fuzz.scenario import Scenario

__all__ = ["mixes_rows", "trained_graphs"]

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


def mixes_rows(s: Scenario) -> bool:
    """Whether there is something to refuse."""
    return bool({"softmax", "own mean", "own norm"} & set(s.layers))


def _norm(**options: Any) -> Any:
    return layers.BatchNormalization(momentum=0.8, beta_initializer="ones", **options)


def _nested() -> Any:
    return keras.Sequential([layers.Dense(SIZE, use_bias=False), _norm(), layers.Activation("tanh")])


def _graph(s: Scenario, hidden: Any) -> Any:
    shared, before = _norm(), hidden
    dense: Callable[..., Any] = lambda **options: layers.Dense(SIZE, activation="tanh", **options)  # noqa: E731
    make: dict[str, Callable[[Any], Any]] = {
        "dense": lambda h: dense(kernel_regularizer="l2")(h),
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
        "norm of steps": lambda h: _norm(axis=1)(h),
        "frozen norm": lambda h: _norm(trainable=False)(h),
        "shared norm": lambda h: shared(dense()(h)),
        "norm and branch": lambda h: layers.Concatenate()([_norm()(h)[..., :2], ops.tanh(h)[..., 2:]]),
        "nested": lambda h: (_nested() if s.kind == "exact" else keras.Sequential([dense(), dense()]))(h),
        "twice": lambda h: _twice(_nested(), h),
    }
    for kind in s.layers:
        hidden, before = make[kind](hidden), hidden
    return hidden


def _twice(model: Any, hidden: Any) -> Any:
    return model(hidden) + model(hidden * 0.5)


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
    hidden = layers.GlobalAveragePooling1D()(_graph(s, hidden))
    if s.whole:
        return wrap(keras.Model(inner, layers.Dense(3)(hidden)))
    tower = wrap(keras.Model(inner, layers.Dense(SIZE)(hidden)))
    return keras.Model(outer, layers.Dense(3)(layers.Activation("tanh")(tower(outer))))


def _across(y: Any, outputs: Any) -> Any:
    gram = ops.matmul(outputs, ops.transpose(outputs))
    return ops.logsumexp(0.3 * gram) + ops.mean(ops.square(outputs - ops.cast(y, outputs.dtype)))


def _wrapped(s: Scenario) -> Callable[[Any], Any]:
    if s.kind == "chunked":
        return lambda part: gradaccum.keras.chunked(part, s.micro, keep=s.keep)
    if s.whole:
        return lambda part: gradaccum.keras.micro_batched(part, s.micro, batch_norm="exact")
    return lambda part: gradaccum.keras.chunked(part, s.micro, batch_norm="exact")


def _batch(s: Scenario, random: np.random.Generator, rows: int) -> tuple[Any, ...]:
    x = random.integers(0, 9, (rows, STEPS)) if s.tokens else random.normal(size=(rows, STEPS, 3))
    if s.tokens:
        x[:, 0] = 1 + x[:, 0] % 8
    elif s.masked:
        x[:, 1:] *= random.random((rows, STEPS - 1, 1)) < 0.7
    batch = (x, random.normal(size=(rows, 3)))
    return (*batch, random.uniform(0.5, 2, rows)) if s.weights else batch


def trained_graphs(s: Scenario, compiled: Callable[..., Any]) -> tuple[Any, Callable[[], Any]]:
    """The model after plain training, and a function that trains ours; `compiled(model, loss=...)` compiles one."""
    random = np.random.default_rng(s.seed)
    data = [_batch(s, random, rows) for rows in s.batches]

    def trained(wrap: Callable[[Any], Any]) -> Any:
        model = compiled(_model(s, wrap), loss=_across if s.losses[0] == "across" else "mse")
        for batch in data:
            model.train_on_batch(*batch)
        first = data[0][0]
        outputs = [model(first, training=False), ops.convert_to_tensor(model.predict(first, verbose=0))]
        model.ends = [ops.convert_to_numpy(output) for output in outputs]
        return model

    return trained(lambda part: part), lambda: trained(_wrapped(s))
