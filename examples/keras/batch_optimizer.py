"""How precise is accumulation? The same training with and without, in float32 and float64, powers of two and not.

    KERAS_BACKEND=tensorflow python examples/keras/batch_optimizer.py           # tensorflow, jax or torch
    KERAS_BACKEND=tensorflow python examples/keras/batch_optimizer.py --quick   # some seconds

Each line trains one model with `fit(batch_size=desired)`, and one with a BatchOptimizer and `fit(batch_size=maximum)`,
and prints the largest relative difference of their weights. It is rounding: some 1e-7 in float32, and 1e-15 in float64
on TensorFlow. On JAX and PyTorch, Keras' own losses (and on PyTorch its layers) compute in single precision either way.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("JAX_ENABLE_X64", "1")  # JAX has no float64 otherwise

import keras  # JAX reads the environment when it starts
import numpy as np

import gradaccum.keras

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # where `examples.demo` is found
from examples.demo.data import Data, load
from examples.demo.progress import Progress

SIZES = [(16, 256), (32, 128), (12, 240), (30, 120)]  # maximum and desired batch size


def network(features: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(128, activation="relu")
    return keras.Sequential([keras.Input((features,)), hidden, keras.layers.Dense(10, activation="softmax")])


def trained(data: Data, rows: int, batch_size: int, desired: int | None, epochs: int) -> list[np.ndarray]:
    """The weights after training, accumulated where a desired batch size is given."""
    model = network(data.features)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if desired is not None:
        optimizer = gradaccum.keras.optimizers.BatchOptimizer(optimizer, batch_size, desired, rows, model)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    x = data.train_x[:rows].astype(keras.backend.floatx()) / data.scale
    model.fit(x, data.train_y[:rows], batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10_000, help="of the data set to train on")
    parser.add_argument("--quick", action="store_true", help="some seconds on scikit-learn's digits")
    arguments = parser.parse_args()
    with Progress() as progress:
        data = load("digits" if arguments.quick else "auto", progress=progress)
    rows, epochs = min(arguments.rows, len(data.train_x)), arguments.epochs
    sizes = SIZES
    if arguments.quick:
        rows, epochs, sizes = 500, 1, SIZES[:1] + SIZES[2:3]

    print(f"{data.name}, {rows} rows, {epochs} epochs, {keras.backend.backend()}")
    print("dtype    maximum  desired  powers of two  largest relative difference")
    for dtype in ("float32", "float64"):
        keras.backend.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)  # the one that layers have made by now is kept otherwise
        for maximum, desired in sizes:
            expected = trained(data, rows, desired, None, epochs)
            actual = trained(data, rows, maximum, desired, epochs)
            difference = max(np.abs(a - e).max() / np.abs(e).max() for a, e in zip(actual, expected, strict=True))
            powers = "yes" if maximum & (maximum - 1) == 0 and desired & (desired - 1) == 0 else "no"
            print(f"{dtype}  {maximum:7}  {desired:7}  {powers:13}  {difference:.1e}")


if __name__ == "__main__":
    main()
