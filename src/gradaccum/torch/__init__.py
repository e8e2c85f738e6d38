"""gradaccum for PyTorch."""

from gradaccum.torch import optim
from gradaccum.torch.train_step import TrainStep

__all__ = ["TrainStep", "optim"]
