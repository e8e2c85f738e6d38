"""gradaccum for Keras 3, on TensorFlow, JAX and PyTorch."""

from gradaccum.keras import callbacks, optimizers

__all__ = ["callbacks", "optimizers"]
