"""The wrapped Keras optimizer against Keras' built-in accumulation and the plain optimizer, on each backend.

Processor time of a `fit` with Adam per window of 8 micro-batches of 16 rows, as a ratio to the built-in's; the plain
optimizer makes an update with each micro-batch. Windows 1, 2, 4, 8, ... are watched with the callback, and reported
apart; the first one of each `fit` is left out. And the peak memory of the process.
"""

from __future__ import annotations

import random
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

NETWORKS = {"784-512-512-10": (784, 512, 12), "32-64-64-10": (32, 64, 24), "1024-2048-2048-10": (1024, 2048, 6)}
"""Features, units, and the windows of a round."""
CONTENDERS = ("built-in", "plain", "gradaccum", "gradaccum with callback")
WATCHED = "watched"
ROWS, STEPS = 16, 8
BUILDS, ROUNDS = 3, 2
"""How often all contenders are built, as where their memory lies decides some per cent; and rounds of each build."""
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}

IN_BACKEND = """
import os, sys
os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3")
from benchmarks import keras_optimizers
"""


def contender(name: str, features: int, units: int, windows: int) -> Callable[[], tuple[list[float], list[float]]]:
    """A function that trains one epoch of so many windows. Returns the seconds of ordinary and of watched ones."""
    import keras

    import gradaccum.keras

    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(units, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((features,)), *dense, keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=STEPS if name == "built-in" else None)
    if name.startswith("gradaccum"):
        optimizer = gradaccum.keras.optimizers.Optimizer(optimizer, steps=STEPS)
    callbacks = [gradaccum.keras.callbacks.GradientAccumulation()] if name.endswith("callback") else []
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS * windows, features)).astype("float32")
    y = np.zeros(ROWS * STEPS * windows, "int32")

    class Clock(keras.callbacks.Callback):
        done, began = 0, 0.0

        def on_train_begin(self, logs: Any = None) -> None:
            self.ordinary, self.watched = list[float](), list[float]()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (batch + 1) % STEPS == 0:
                _ = float((logs or {})["loss"])  # waits for it
                self.done += 1
                if batch >= STEPS:
                    found = self.ordinary if self.done & (self.done - 1) else self.watched
                    found.append(time.process_time() - self.began)
                self.began = time.process_time()

    clock = Clock()

    def epoch() -> tuple[list[float], list[float]]:
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[*callbacks, clock])
        return clock.ordinary, clock.watched

    return epoch


def print_times(networks: list[str], builds: int) -> None:
    """In the backend's process: a line per network, of the ratios to the built-in's time, and of watched windows."""
    for network in networks:
        windows, shuffle = NETWORKS[network][-1], random.Random(0)
        times, looks = {name: list[float]() for name in CONTENDERS}, list[float]()
        for _ in range(builds):
            order = shuffle.sample(CONTENDERS, len(CONTENDERS))
            contenders = {name: contender(name, *NETWORKS[network]) for name in order}
            for epoch in contenders.values():
                for _ in range(-(-WARM_UP // windows)):
                    epoch()
            for _ in range(ROUNDS):
                for name in shuffle.sample(CONTENDERS, len(CONTENDERS)):
                    ordinary, watched = contenders[name]()
                    times[name].append(statistics.median(ordinary))
                    if name == CONTENDERS[-1]:
                        looks.extend(seconds / times[name][-1] for seconds in watched)
        pairs = {name: zip(mine, times["built-in"]) for name, mine in times.items()}
        found = {name: ratio_of([mine / theirs for mine, theirs in pair]) for name, pair in pairs.items()}
        send({**found, WATCHED: ratio_of(looks)})


def print_peak(name: str) -> None:
    """In a process of its own: the peak of a short training of the largest network, in bytes."""
    import resource

    contender(name, *NETWORKS["1024-2048-2048-10"][:2], 3)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    options = arguments(__doc__)
    builds = 1 if options.quick else BUILDS
    backends = in_short(BACKENDS) if options.quick else BACKENDS
    networks = [*NETWORKS][:1] if options.quick else [*NETWORKS]
    times, peaks = [], []
    for backend, title in backends.items():
        printed = in_fresh_process(f"{IN_BACKEND}keras_optimizers.print_times({networks}, {builds})", backend)
        lines = printed.splitlines()[-len(networks) :]
        for network, line in zip(networks, lines, strict=True):
            found = received(line, "built-in", builds * ROUNDS, f"{title}, {network}")
            times.append([title, network, *(found[name] for name in CONTENDERS[1:])])
        names = CONTENDERS[-1:] if options.quick else CONTENDERS
        code = f"{IN_BACKEND}keras_optimizers.print_peak"
        peaks.append([int(in_fresh_process(f"{code}({name!r})", backend)) for name in names])
    if not options.quick:
        compared = [[row[i] / row[0] for row in peaks] for i in (1, -1)]
        spans = [f"{min(some):.2f} to {max(some):.2f}" for some in compared]
    body = (
        f"Processor time of `fit` per window of {STEPS} micro-batches of {ROWS} rows with Adam, relative to Keras' "
        'built-in accumulation; "plain" makes an update with each micro-batch. Watched windows are left out.\n\n'
        + table(["backend", "network", *CONTENDERS[1:]], times)
    )
    if not options.quick:
        body += (
            "\n\nPeak memory on 1024-2048-2048-10, relative to the built-in's: "
            f"plain {spans[0]}, gradaccum with the callback {spans[1]}."
        )
    versions = ["keras", "tensorflow-cpu", "jax", "torch"]
    publish(
        "keras_optimizers",
        "Keras optimizers, wrapped",
        body,
        versions,
        options,
        ours=["gradaccum", "gradaccum with callback"],
    )


if __name__ == "__main__":
    main()
