"""The two passes of the backend that Keras runs on; the other two are not imported."""

from __future__ import annotations

from typing import Any

import keras

from gradaccum.keras.chunking.body import Body

__all__ = ["two_passes"]


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The tensors in the outputs of the whole batch, and their masks.

    Raises:
        ValueError: There are none for this backend.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from gradaccum.keras.chunking import two_passes_tensorflow

        return two_passes_tensorflow.two_passes(body, micro_batch_size, keep)
    if backend == "jax":
        from gradaccum.keras.chunking import two_passes_jax

        return two_passes_jax.two_passes(body, micro_batch_size, keep)
    if backend == "torch":
        from gradaccum.keras.chunking import two_passes_torch

        return two_passes_torch.two_passes(body, micro_batch_size, keep)
    raise ValueError(f"chunked works on TensorFlow, JAX and PyTorch. Received: Keras' {backend} backend.")
