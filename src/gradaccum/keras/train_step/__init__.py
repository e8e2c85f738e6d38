"""Split the batch: `fit` with the large batch runs in micro-batches that fit."""

from gradaccum.keras.train_step.proof import ragged_size
from gradaccum.keras.train_step.step import MicroBatchedStep, remove_step

__all__ = ["MicroBatchedStep", "ragged_size", "remove_step"]
