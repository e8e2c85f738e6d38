"""TensorFlow, JAX and PyTorch behind one interface: loops over micro-batches, gradients, assignments, random numbers.

The order of things stands once, in `train_step`, `chunking` and `optimizer`. What they ask of the backend that Keras
runs on is a module here (`base` has the interface); the other two are not imported.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import keras

__all__ = ["running"]

BACKENDS = ("tensorflow", "jax", "torch")


@functools.cache
def running() -> Any:
    """The backend that Keras runs on."""
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise ImportError(
            f"gradaccum.keras trains on the Keras backends {', '.join(BACKENDS)}. Received: {backend!r}. Choose one "
            "with the environment variable KERAS_BACKEND, before the first import of keras."
        )
    base, own = (importlib.import_module(f"gradaccum.keras.backends.{name}") for name in ("base", f"on_{backend}"))
    return types.SimpleNamespace(**{**vars(base), **vars(own)})
