"""Processor time of an ordinary update relative to plain `fit(batch_size=256)`, and peak memory, beside Keras' own
`gradient_accumulation_steps=16` and a loop by hand without Keras' losses, metrics or callbacks. "proof": an update that
is proven (1, 2, 4, 8, ...). JAX compiles gradients of convolutions in a plain loop to slow code on CPUs.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import (
    WARM_UP,
    arguments,
    in_fresh_process,
    in_short,
    publish,
    ratio_of,
    received,
    send,
    table,
)

BATCH, MICRO = 256, 16
CONTENDERS = ("plain 256", "built-in 16 x 16", "by hand", "gradaccum", 'gradaccum "auto"')
PROOF = "proof"
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}

IN_BACKEND = """
import os, sys
os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3")
from benchmarks import keras_micro_batched
"""


NETWORKS = {"CNN": 4, "784-512-512-10": 12}
"""The updates of a round."""


def network(kind: str) -> Any:
    """A small CNN whose activations are what takes the memory; or the guide's network."""
    import keras

    keras.utils.set_random_seed(0)
    if kind != "CNN":
        dense = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
        return keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), *dense, keras.layers.Dense(10)])
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def contender(name: str, kind: str, batches: int) -> Callable[[], list[float]]:
    """A function that trains on so many batches. Returns the seconds that each took, which are NaN if it was proved."""
    import keras

    import gradaccum.keras

    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH * batches, 28, 28, 1)).astype("float32")
    y = generator.integers(0, 10, BATCH * batches).astype("int32")
    model = network(kind)
    if name == "by hand":
        return by_hand(model, x, y)
    if name.startswith("gradaccum"):
        model = gradaccum.keras.micro_batched(model, "auto" if "auto" in name else MICRO)
    per_update = BATCH // MICRO if name.startswith("built-in") else 1
    model.compile(
        optimizer=keras.optimizers.Adam(gradient_accumulation_steps=per_update if per_update > 1 else None),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.seconds: list[float] = []
            self.began, self.proved = time.process_time(), 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (batch + 1) % per_update:
                return
            _ = float((logs or {})["loss"])  # waits for it
            now, updates = time.process_time(), int(self.model.optimizer.iterations)
            proved = name.startswith("gradaccum") and updates & (updates - 1) == 0
            if batch < per_update:
                self.proved = now - self.began
            self.seconds.append(float("nan") if proved or batch < per_update else now - self.began)
            self.began = time.process_time()

    clock = Clock()

    def fit() -> list[float]:
        size = BATCH // per_update
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0, callbacks=[clock])
        return [clock.proved, *clock.seconds[1:]]

    return fit


def by_hand(model: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], list[float]]:
    """The loop that somebody writes who knows the backend."""
    import keras

    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[keras.backend.backend()](model, optimizer, loss_of)

    def epoch() -> list[float]:
        seconds = []
        for start in range(0, len(x), BATCH):
            began = time.process_time()
            step(x[start : start + BATCH], y[start : start + BATCH])
            seconds.append(time.process_time() - began)
        return seconds

    return epoch


def _tensorflow(model: Any, optimizer: Any, loss_of: Any) -> Callable[..., object]:
    import tensorflow as tf

    weights = model.trainable_variables

    @tf.function
    def step(x: Any, y: Any) -> Any:
        def body(i: Any, sums: Any, total: Any) -> Any:
            rows = slice(i * MICRO, (i + 1) * MICRO)
            with tf.GradientTape() as tape:
                loss = loss_of(y[rows], model(x[rows], training=True)) / (BATCH // MICRO)
            return i + 1, [a + b for a, b in zip(sums, tape.gradient(loss, weights))], total + loss

        zeros = [tf.zeros(weight.shape) for weight in weights]
        _, sums, total = tf.while_loop(
            lambda i, *_: i < BATCH // MICRO, body, (0, zeros, tf.constant(0.0)), parallel_iterations=1
        )
        optimizer.apply(sums, weights)
        return total

    return lambda x, y: step(tf.constant(x), tf.constant(y)).numpy()


def _jax(model: Any, optimizer: Any, loss_of: Any) -> Callable[..., object]:
    import jax
    import jax.numpy as jnp

    fixed = [v.value for v in model.non_trainable_variables]

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return loss_of(y, model.stateless_call(weights, fixed, x, training=True)[0]) / (BATCH // MICRO)

    @jax.jit
    def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
        def body(carry: Any, rows: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(weights, *rows)
            return jax.tree.map(jnp.add, carry, (gradients, value)), None

        zeros = (jax.tree.map(jnp.zeros_like, weights), jnp.zeros(()))
        cut = [a.reshape(-1, MICRO, *a.shape[1:]) for a in (x, y)]
        (sums, total), _ = jax.lax.scan(body, zeros, cut)
        return *optimizer.stateless_apply(state, sums, weights), total

    held = [[v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]]

    def run(x: Any, y: Any) -> None:
        *held[:], total = step(*held, x, y)
        total.block_until_ready()

    return run


def _torch(model: Any, optimizer: Any, loss_of: Any) -> Callable[..., object]:
    import torch

    def step(x: Any, y: Any) -> float:
        x, y, total = torch.from_numpy(x), torch.from_numpy(y), 0.0
        model.zero_grad()
        for start in range(0, BATCH, MICRO):
            rows = slice(start, start + MICRO)
            loss = loss_of(y[rows], model(x[rows], training=True)) / (BATCH // MICRO)
            loss.backward()
            total += loss.detach()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        return float(total)

    return step


def print_times(kind: str, batches: int, rounds: int) -> None:
    """In the backend's process: the times, as ratios to plain `fit`."""
    contenders = {name: contender(name, kind, batches) for name in CONTENDERS}
    for run in contenders.values():
        for _ in range(-(-WARM_UP // batches)):
            run()
    shuffle, times, proofs = random.Random(0), {name: list[float]() for name in CONTENDERS}, list[float]()
    for _ in range(rounds):
        for name in shuffle.sample(CONTENDERS, len(CONTENDERS)):
            first, *others = contenders[name]()
            times[name].append(statistics.median(seconds for seconds in others if seconds == seconds))
            if name == "gradaccum":
                proofs.append(first / times[name][-1])
    pairs = {name: zip(mine, times["plain 256"]) for name, mine in times.items()}
    found = {name: ratio_of([mine / plain for mine, plain in pair]) for name, pair in pairs.items()}
    send({**found, PROOF: ratio_of(proofs)})


def print_memory(name: str, batches: int) -> None:
    """In a process of its own: by how many MiB an epoch raises the peak over what one row at a time takes."""
    epoch = contender(name, "CNN", batches)
    warm = network("CNN")
    warm.compile(optimizer="adam", loss="mse")
    warm.train_on_batch(np.zeros((1, 28, 28, 1), "float32"), np.zeros((1, 10), "float32"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    epoch()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    """Run it."""
    options = arguments(__doc__)
    rounds = 3 if options.quick else 9
    rows = []
    for backend, title in (in_short(BACKENDS) if options.quick else BACKENDS).items():
        for kind, batches in NETWORKS.items():
            count = 4 if options.quick else batches
            code = f"{IN_BACKEND}\nkeras_micro_batched.print_times({kind!r}, {count}, {rounds})"
            line = in_fresh_process(code, backend).splitlines()[-1]
            rows.append([title, f"time, {kind}", *received(line, "plain 256", rounds, f"{title}, {kind}").values()])
        memory = []
        for name in CONTENDERS[3:4] if options.quick else CONTENDERS:
            code = f"{IN_BACKEND}\nkeras_micro_batched.print_memory({name!r}, 2)"
            memory.append(f"{float(in_fresh_process(code, backend).strip().splitlines()[-1]):.0f} MiB")
        rows.append([title, "peak, CNN", *memory, ""])
    publish(
        "keras_micro_batched",
        "`fit` at 256 rows in micro-batches of 16",
        f"{(__doc__ or '').strip()}\n\n{table(['backend', '', *CONTENDERS, PROOF], rows)}",
        ["keras", "tensorflow-cpu", "jax", "torch"],
        options,
        ours=["gradaccum", 'gradaccum "auto"'],
    )


if __name__ == "__main__":
    main()
