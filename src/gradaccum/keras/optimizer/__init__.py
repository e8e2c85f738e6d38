"""Wrap the optimizer: `fit` with small batches makes the large batch's updates."""

from gradaccum.keras.optimizer.optimizer import LossScaledOptimizer, Optimizer, wrapped_optimizer
from gradaccum.keras.optimizer.rows import RowWatch, leaves_with_rows, listing
from gradaccum.keras.optimizer.window import Added, Counts, StepsRule, Window, minimum, where

__all__ = [
    "Added",
    "Counts",
    "LossScaledOptimizer",
    "Optimizer",
    "RowWatch",
    "StepsRule",
    "Window",
    "leaves_with_rows",
    "listing",
    "minimum",
    "where",
    "wrapped_optimizer",
]
