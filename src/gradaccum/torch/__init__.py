"""gradaccum for PyTorch."""

from gradaccum.torch.chunked import chunked

__all__ = ["chunked"]
