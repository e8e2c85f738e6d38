"""Split the batch: `fit` with the large batch runs in micro-batches that fit."""

from gradaccum.keras.train_step.backends import step_class
from gradaccum.keras.train_step.data import has_rows, rows_of
from gradaccum.keras.train_step.proof import ragged_size
from gradaccum.keras.train_step.step import MicroBatchedStep, remove_step

__all__ = ["MicroBatchedStep", "has_rows", "ragged_size", "remove_step", "rows_of", "step_class"]
