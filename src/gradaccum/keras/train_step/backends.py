"""The training step of the backend that Keras runs on; the other two are not imported."""

from __future__ import annotations

import keras

from gradaccum.keras.train_step.step import MicroBatchedStep

__all__ = ["step_class"]


def step_class() -> type[MicroBatchedStep]:
    """That of the backend.

    Raises:
        ValueError: There is none for it.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from gradaccum.keras.train_step.step_tensorflow import TensorFlowStep

        return TensorFlowStep
    if backend == "jax":
        from gradaccum.keras.train_step.step_jax import JaxStep

        return JaxStep
    if backend == "torch":
        from gradaccum.keras.train_step.step_torch import TorchStep

        return TorchStep
    raise ValueError(f"micro_batched trains on TensorFlow, JAX and PyTorch. Received: Keras' {backend} backend.")
