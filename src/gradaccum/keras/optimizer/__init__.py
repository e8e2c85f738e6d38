"""Wrap the optimizer: `fit` with small batches makes the large batch's updates."""

from gradaccum.keras.optimizer.optimizer import LossScaledOptimizer, Optimizer, wrapped_optimizer
from gradaccum.keras.optimizer.window import Counts, StepsRule, where

__all__ = [
    "Counts", "LossScaledOptimizer", "Optimizer", "StepsRule", "where", "wrapped_optimizer",
]  # fmt: skip
