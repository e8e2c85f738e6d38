"""What JAX' shell adds to the proof of `gradaccum.core`: rows run by `value_and_grad`, and why they differ."""

from gradaccum.jax.proof.causes import find_causes
from gradaccum.jax.proof.trial import Trial

__all__ = ["Trial", "find_causes"]
