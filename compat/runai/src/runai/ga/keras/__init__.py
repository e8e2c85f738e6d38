"""Gradient accumulation around Keras optimizers."""

from runai.ga.keras import optimizers

__all__ = ["optimizers"]
