"""transformers' Trainer, and the trainers that are built on it."""

from gradaccum.extras import require

require("transformers")

from gradaccum.integrations.transformers.trainer import MicroBatchTrainer

__all__ = ["MicroBatchTrainer"]
