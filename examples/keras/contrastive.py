"""Pictures of digits against their names, in `fit`: 512 pairs per update, in the memory of 64.

The loss of a pair looks at all other pairs of its batch. Chunked towers make the updates of the large batch; naive
accumulation of micro-batches' losses trains something else, because a pair sees 63 others, not 511.

    KERAS_BACKEND=jax python examples/keras/contrastive.py --out docs/images/keras_contrastive.png
    python examples/keras/contrastive.py --quick        # one epoch
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import gradaccum.keras

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BATCH, MICRO = 512, 64


def towers(wrap: Callable[[Any], Any] = lambda tower: tower) -> keras.Model:
    keras.utils.set_random_seed(0)
    pictures, names = layers.Input((64,)), layers.Input((5, 128))
    of_pictures = [layers.Dense(64, "relu"), layers.Dense(16)]
    of_names = [layers.Dense(16, use_bias=False), layers.Flatten(), layers.Dense(16)]
    outputs = [wrap(keras.Sequential(of_pictures))(pictures), wrap(keras.Sequential(of_names))(names)]
    return keras.Model([pictures, names], layers.Concatenate()(outputs))


def contrastive(y: Any, outputs: Any) -> Any:
    a, b = (ops.normalize(tower, axis=1) for tower in ops.split(outputs, 2, axis=1))
    logits = ops.matmul(a, ops.transpose(b)) * 10
    return ops.mean(ops.logsumexp(logits, axis=1) + ops.logsumexp(logits, axis=0) - 2 * ops.diagonal(logits)) / 2


def train(model: keras.Model, x: list[np.ndarray], epochs: int, steps: int = 1) -> list[float]:
    """The contrastive loss of the first batch's pairs after each epoch."""
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=steps if steps > 1 else None)
    model.compile(optimizer=optimizer, loss=contrastive)
    losses = []
    few = [array[:BATCH] for array in x]
    for _ in range(epochs):
        model.fit(x, np.zeros((len(x[0]), 1)), batch_size=BATCH // steps, shuffle=False, verbose=0)
        losses.append(float(contrastive(None, ops.convert_to_tensor(model.predict(few, BATCH, verbose=0)))))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    parser.add_argument("--out", help="a PNG file for the curves")
    options = parser.parse_args()
    digits = load_digits()
    rows = 3 * BATCH
    letters = np.eye(128, dtype="float32")[[[*map(ord, name.ljust(5))] for name in NAMES]]
    x = [digits.data[:rows].astype("float32") / 16, letters[digits.target[:rows]]]
    epochs = 1 if options.quick else 8
    curves = {
        f"large batch, {BATCH} pairs": train(towers(), x, epochs),
        f"chunked, {MICRO} pairs in memory": train(towers(lambda t: gradaccum.keras.chunked(t, MICRO)), x, epochs),
        f"naive accumulation of {MICRO} pairs": train(towers(), x, epochs, BATCH // MICRO),
    }
    for name, losses in curves.items():
        print(f"{name:36} loss {losses[-1]:.4f}")
    if options.out:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for (name, losses), style in zip(curves.items(), ("-", "--", ":")):
            axes.plot(range(1, epochs + 1), losses, style, label=name, linewidth=2)
        axes.set(xlabel="epoch", ylabel=f"contrastive loss of {BATCH} pairs")
        axes.legend()
        figure.savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
