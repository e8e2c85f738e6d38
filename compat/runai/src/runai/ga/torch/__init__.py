"""Gradient accumulation around PyTorch optimizers."""

import gradaccum.torch  # noqa: F401  # first: it says how to install what is missing
from runai.ga.torch import optim

__all__ = ["optim"]
