"""A multi-layer perceptron on FashionMNIST, with gradients accumulated over micro-batches that fit.

KERAS_BACKEND=jax python examples/keras/mlp.py            # tensorflow, jax or torch
KERAS_BACKEND=jax python examples/keras/mlp.py --quick    # some seconds on scikit-learn's digits
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import keras

import gradaccum.keras

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # where `examples.demo` is found
from examples.demo.data import load
from examples.demo.progress import Progress


def network(features: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="some seconds on scikit-learn's digits")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    with Progress() as progress:
        data = load("digits" if arguments.quick else "auto", progress=progress)
    model = network(data.features)
    model.compile(
        optimizer=gradaccum.keras.optimizers.RMSprop(steps=arguments.steps),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        data.train_x / data.scale,
        data.train_y,
        batch_size=arguments.batch_size,
        epochs=1 if arguments.quick else arguments.epochs,
        verbose=2,
        # Closes the window at each epoch's end, and weighs a short last batch by its rows.
        callbacks=[gradaccum.keras.callbacks.GradientAccumulation()],
    )
    loss, accuracy = model.evaluate(data.test_x / data.scale, data.test_y, verbose=0)
    print(f"{int(model.optimizer.iterations)} updates, test loss {loss:.3f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
