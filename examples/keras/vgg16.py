"""Keras' own VGG16 on CIFAR-10, with gradients accumulated over micro-batches that fit.

    KERAS_BACKEND=jax python examples/keras/vgg16.py           # tensorflow, jax or torch
    KERAS_BACKEND=jax python examples/keras/vgg16.py --quick   # two updates on scikit-learn's digits, enlarged

Without a network to download CIFAR-10 from, the digits take its place, as pictures of the same shape.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import gradaccum.keras


def pictures(quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of 32 x 32 pixels in three colours from 0 to 1, and their labels."""
    if not quick:
        try:
            (x, y), _ = keras.datasets.cifar10.load_data()
            return x.astype("float32") / 255, y[:, 0]
        except Exception as error:  # urllib's, ssl's or Keras' own
            print(f"CIFAR-10 could not be downloaded ({error}). Using scikit-learn's digits instead.")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8, 1) / 16, np.ones((1, 4, 4, 3))).astype("float32")
    return x, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=8, help="micro-batches of an update")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two updates")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    x, y = pictures(arguments.quick)
    if arguments.quick:
        arguments.batch_size, arguments.steps, x, y = 2, 2, x[:8], y[:8]
    model = keras.applications.VGG16(weights=None, input_shape=(32, 32, 3), classes=10)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer = gradaccum.keras.optimizers.Optimizer(optimizer, steps=arguments.steps)  # the line
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        x,
        y,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        verbose=2,
        callbacks=[gradaccum.keras.callbacks.GradientAccumulation()],
    )
    print(f"{int(optimizer.iterations)} updates of {arguments.batch_size * arguments.steps} pictures")


if __name__ == "__main__":
    main()
