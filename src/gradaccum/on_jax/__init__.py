"""What both shells need where the arrays are JAX's: the JAX shell, and Keras on its JAX backend."""

from gradaccum.on_jax.loops import scan

__all__ = ["scan"]
