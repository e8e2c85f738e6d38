"""gradaccum for PyTorch."""

from gradaccum.torch import optim
from gradaccum.torch.equivalence import check_equivalence
from gradaccum.torch.train_step import TrainStep

__all__ = ["TrainStep", "check_equivalence", "optim"]
