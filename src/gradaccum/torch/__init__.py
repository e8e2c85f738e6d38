"""gradaccum for PyTorch."""

from gradaccum.torch import optim
from gradaccum.torch.chunked import chunked
from gradaccum.torch.train_step import TrainStep

__all__ = ["TrainStep", "chunked", "optim"]
