"""gradaccum for PyTorch."""

from gradaccum.torch import optim
from gradaccum.torch.chunked import chunked

__all__ = ["chunked", "optim"]
