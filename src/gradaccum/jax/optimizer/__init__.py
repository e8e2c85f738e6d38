"""Wrap the optimizer: one inner update per window."""

from gradaccum.jax.optimizer.state import WindowedState, noise_scale, updated
from gradaccum.jax.optimizer.windowed import WindowedOptimizer, windowed

__all__ = ["WindowedOptimizer", "WindowedState", "noise_scale", "updated", "windowed"]
