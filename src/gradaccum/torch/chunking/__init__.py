"""Chunk the model: outputs of all rows, activations of one micro-batch."""

from gradaccum.torch.chunking.chunked import Chunked, chunked

__all__ = ["Chunked", "chunked"]
