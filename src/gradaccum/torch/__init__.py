"""gradaccum for PyTorch."""

from gradaccum.torch import optim

__all__ = ["optim"]
