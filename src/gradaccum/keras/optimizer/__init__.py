"""Wrap the optimizer: `fit` with small batches makes the large batch's updates."""

from gradaccum.keras.optimizer.counts import Counts, minimum, where
from gradaccum.keras.optimizer.optimizer import LossScaledOptimizer, Optimizer, wrapped_optimizer
from gradaccum.keras.optimizer.rows import RowWatch

__all__ = ["Counts", "LossScaledOptimizer", "Optimizer", "RowWatch", "minimum", "where", "wrapped_optimizer"]
