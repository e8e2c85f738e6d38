"""Sizes without a device at hand."""

from gradaccum.jax.measure.suggest import estimate_size

__all__ = ["estimate_size"]
