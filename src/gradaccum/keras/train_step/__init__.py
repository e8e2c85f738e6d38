"""Split the batch: `fit` with the large batch runs in micro-batches that fit."""

from gradaccum.keras.train_step.step import MicroBatchedStep, remove_step

__all__ = ["MicroBatchedStep", "remove_step"]
