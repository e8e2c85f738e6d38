"""Gradient accumulation around Keras optimizers."""

import gradaccum.keras  # noqa: F401  # first: it says how to install what is missing
from runai.ga.keras import optimizers

__all__ = ["optimizers"]
