"""transformers' Trainer, and the trainers that are built on it."""

from gradaccum.extras import require

require("transformers")

__all__: list[str] = []
