"""transformers' Trainer, and the trainers that are built on it."""

from gradaccum.extras import require
from gradaccum.lazy import listed

require("transformers")

from gradaccum.integrations.transformers.trainer import MicroBatchTrainer

__all__ = ["MicroBatchTrainer"]

__dir__ = listed(__name__)
