"""TensorFlow, JAX and PyTorch behind one interface: loops over micro-batches, gradients, assignments, random numbers.

The order of things stands once, in `train_step`, `chunking` and `optimizer`. What they ask of the backend that Keras
runs on is a module here; the other two are not imported. Each has

- `MicroBatches`: a batch that is cut along its rows. `run(micro, carry, specs, threads)` calls
  `micro(micro_batch, size, carry) -> (carry, rows to keep)` for each: a `tf.while_loop`, a `lax.scan`, a loop of
  Python's. Variables that move are `threads`: where a loop is a function, it takes their values along.
- `GradientSum`: gradients added up. `add(carry, forward, share)` runs `forward()` and what differentiates it.
- `Training`: a training step's own. `attempt` runs a window, and once more where that must start over.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

__all__ = ["running"]

BACKENDS = ("tensorflow", "jax", "torch")


def running() -> Any:
    """The module of the backend that Keras runs on.

    Raises:
        ImportError: There is none for it.
    """
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise ImportError(
            f"gradaccum.keras trains on the Keras backends {', '.join(BACKENDS)}. Received: {backend!r}. Choose one "
            "with the environment variable KERAS_BACKEND, before the first import of keras."
        )
    return importlib.import_module(f"gradaccum.keras.backends.on_{backend}")
