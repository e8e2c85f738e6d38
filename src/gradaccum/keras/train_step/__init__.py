"""Split the batch: `fit` with the large batch runs in micro-batches that fit."""

from gradaccum.keras.train_step.data import has_rows, rows_of
from gradaccum.keras.train_step.gradients import value_and_gradients
from gradaccum.keras.train_step.step import MicroBatchedStep
from gradaccum.keras.train_step.step_jax import JaxStep
from gradaccum.keras.train_step.step_tensorflow import TensorFlowStep
from gradaccum.keras.train_step.step_torch import TorchStep

__all__ = ["JaxStep", "MicroBatchedStep", "TensorFlowStep", "TorchStep", "has_rows", "rows_of", "value_and_gradients"]
