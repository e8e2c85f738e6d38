"""Gradient accumulation around PyTorch optimizers."""

from runai.ga.torch import optim

__all__ = ["optim"]
