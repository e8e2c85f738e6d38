"""TensorFlow, JAX and PyTorch behind one interface: loops over micro-batches, gradients, assignments, random numbers.

The order of things stands once, in `train_step`, `chunking` and `optimizer`. What they ask of the backend that Keras
runs on is a module here (`base` has the interface); the other two are not imported.
"""

import functools
import importlib
from typing import Any

import keras

__all__ = ["running"]


@functools.cache
def running() -> Any:
    """The backend that Keras runs on."""
    backend, known = keras.backend.backend(), ("tensorflow", "jax", "torch")
    if backend not in known:
        raise ImportError(
            f"gradaccum.keras trains on the Keras backends {', '.join(known)}. Received: {backend!r}. Choose one with "
            "the environment variable KERAS_BACKEND, before the first import of keras."
        )
    return importlib.import_module(f"gradaccum.keras.backends.on_{backend}").Backend()
