"""Which accumulation the running Keras backend needs: `accumulation` is that module.

Each has the same names: `accumulate(window, gradients, rows)`, `close(window)`, and where a window's variables live.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

__all__ = ["accumulation"]

BACKENDS = ("tensorflow", "jax", "torch")


def _accumulation() -> Any:
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise ImportError(
            f"gradaccum.keras trains on the Keras backends {', '.join(BACKENDS)}. Received: {backend!r}. Choose one "
            "with the environment variable KERAS_BACKEND, before the first import of keras."
        )
    return importlib.import_module(f"gradaccum.keras.optimizer.accumulation_{backend}")


accumulation = _accumulation()
