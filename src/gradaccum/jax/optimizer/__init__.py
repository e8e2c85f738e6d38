"""Wrap the optimizer: one inner update per window."""

from gradaccum.jax.optimizer.noise import noise_scale
from gradaccum.jax.optimizer.state import WindowedState, updated
from gradaccum.jax.optimizer.windowed import WindowedOptimizer, windowed

__all__ = ["WindowedOptimizer", "WindowedState", "noise_scale", "updated", "windowed"]
