"""The experiment's Keras side, on whichever backend Keras runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow greets at length otherwise

import keras
import numpy as np
from examples.demo.data import Data
from examples.demo.guide import Epoch, Notify, Plan, Run, Setup

import gradaccum.keras

__all__ = ["train"]


def train(setup: Setup, data: Data, plan: Plan, initial: Sequence[np.ndarray], notify: Notify) -> Run:
    """One run, from the initial parameters on, in a process of its own."""
    _use(setup.dtype)
    x, test_x = ((part / data.scale).astype(setup.dtype) for part in (data.train_x, data.test_x))
    model = _network(initial)
    optimizer: Any = keras.optimizers.SGD(setup.learning_rate)
    epochs = _Epochs(test_x, data.test_y, notify)
    callbacks: list[Any] = [epochs]
    if plan.steps > 1:
        optimizer = gradaccum.keras.optimizers.Optimizer(optimizer, steps=plan.steps)
        callbacks.insert(0, gradaccum.keras.callbacks.GradientAccumulation())
    model.compile(optimizer=optimizer, loss=_cross_entropy)
    arguments = {"batch_size": plan.micro_batch_size, "epochs": setup.epochs, "shuffle": False, "verbose": 0}
    model.fit(x, data.train_y, callbacks=callbacks, **arguments)
    return Run(
        plan, epochs.seen, epochs.seconds, int(optimizer.iterations), model.get_weights(), single_precision=_single()
    )


def _use(dtype: str) -> None:
    keras.backend.set_floatx(dtype)
    if keras.backend.backend() == "jax" and dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    if keras.backend.backend() == "torch":
        import torch

        # Layers this small gain nothing from a second thread, and on a busy machine the two wait for each other.
        torch.set_num_threads(1)


def _single() -> bool:
    """Whether matrices are multiplied in float32, whatever their dtype: Keras casts them down on PyTorch."""
    return keras.backend.backend() == "torch" and keras.backend.result_type("float64", "float64") == "float32"


def _network(initial: Sequence[np.ndarray]) -> keras.Model:
    shapes = [weight.shape for weight in initial[::2]]
    layers: list[Any] = [keras.Input((shapes[0][0],))]
    layers += [keras.layers.Dense(outputs, activation="relu") for _, outputs in shapes[:-1]]
    model = keras.Sequential([*layers, keras.layers.Dense(shapes[-1][1])])
    model.set_weights([values.copy() for values in initial])  # PyTorch would train in their memory
    return model


def _cross_entropy(labels: Any, outputs: Any) -> Any:
    """Of each row. Keras' own mixes single precision in on PyTorch."""
    labels = keras.ops.reshape(keras.ops.cast(labels, "int32"), (-1, 1))
    return -keras.ops.squeeze(keras.ops.take_along_axis(keras.ops.log_softmax(outputs), labels, axis=1), 1)


class _Epochs(keras.callbacks.Callback):
    """Tests at each epoch's end, and counts the seconds of training: without the first step, which compiles."""

    def __init__(self, x: np.ndarray, y: np.ndarray, notify: Notify) -> None:
        super().__init__()
        self._x, self._y, self._notify = x, y, notify
        self._start: float | None = None
        self.seen: list[Epoch] = []
        self.seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter() if self.seen else None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds += time.perf_counter() - (self._start or time.perf_counter())
        outputs = self.model.predict(self._x, batch_size=512, verbose=0)
        outputs = outputs - outputs.max(1, keepdims=True)
        losses = np.log(np.exp(outputs).sum(1)) - outputs[np.arange(len(outputs)), self._y]
        accuracy = float((outputs.argmax(1) == self._y).mean())
        self.seen.append(Epoch(float((logs or {})["loss"]), float(losses.mean()), accuracy))
        self._notify(self.seen[-1])
