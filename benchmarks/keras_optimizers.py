"""The wrapped Keras optimizer against Keras' built-in accumulation and the plain optimizer, on each backend.

Time of a `fit` per micro-batch of 16 rows with Adam, as a ratio to the plain optimizer, which makes an update with each
one; and the peak memory of the process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from benchmarks.harness import WARM_UP, arguments, in_fresh_process, in_short, publish, ratios, received, send, table

NETWORKS = {"784-512-512-10": (784, 512), "32-64-64-10": (32, 64), "1024-2048-2048-10": (1024, 2048)}
CONTENDERS = ("plain", "built-in", "gradaccum", "gradaccum with callback")
ROWS, STEPS = 16, 8
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}

IN_BACKEND = """
import os, sys
os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3")
from benchmarks import keras_optimizers
"""


def contender(name: str, features: int, units: int, batches: int) -> Callable[[], None]:
    """A function that trains one epoch of micro-batches, 8 to an update where it accumulates."""
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
    x = np.random.default_rng(0).normal(size=(ROWS * batches, features)).astype("float32")
    y = np.zeros(ROWS * batches, "int32")

    def epoch() -> None:
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=callbacks)

    return epoch


def print_times(networks: list[str], batches: int, rounds: int) -> None:
    """In the backend's process: a line per network, of the ratios to the plain time."""
    for network in networks:
        contenders = {name: contender(name, *NETWORKS[network], batches) for name in CONTENDERS}
        send(ratios(contenders, "plain", rounds, warm_up=-(-WARM_UP * STEPS // batches)))


def print_peak(name: str) -> None:
    """In a process of its own: the peak of a short training of the largest network, in bytes."""
    import resource

    contender(name, *NETWORKS["1024-2048-2048-10"], 3 * STEPS)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    options = arguments(__doc__)
    batches, rounds, processes = (16, 2, 1) if options.quick else (32, 5, 1)
    backends = in_short(BACKENDS) if options.quick else BACKENDS
    networks = [*NETWORKS][:1] if options.quick else [*NETWORKS]
    times, peaks = [], []
    for backend, title in backends.items():
        printed = in_fresh_process(
            f"{IN_BACKEND}keras_optimizers.print_times({networks}, {batches}, {rounds})", backend
        )
        lines = printed.splitlines()[-len(networks) :]
        for network, line in zip(networks, lines, strict=True):
            found = received(line, "plain", rounds, f"{title}, {network}")
            times.append([title, network, *(found[name] for name in CONTENDERS[1:])])
        measured = [
            [in_fresh_process(f"{IN_BACKEND}keras_optimizers.print_peak({name!r})", backend) for _ in range(processes)]
            for name in (CONTENDERS[-1:] if options.quick else CONTENDERS)
        ]
        peaks.append([statistics.median(map(int, each)) for each in measured])
    body = (
        f"Time of `fit` per micro-batch of {ROWS} rows with Adam in windows of {STEPS}, relative to the plain "
        "optimizer, which makes an update with each micro-batch.\n\n"
        + table(["backend", "network", *CONTENDERS[1:]], times)
        + "\n\nThe peak memory of the process that trains 1024-2048-2048-10, relative to the plain optimizer's, is "
        + ", and ".join(
            f"{min(row[i] / row[0] for row in peaks):.2f} to {max(row[i] / row[0] for row in peaks):.2f} for {names}"
            for i, names in ((1, "the built-in"), (-1, "gradaccum with the callback"))
        )
        + "."
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
