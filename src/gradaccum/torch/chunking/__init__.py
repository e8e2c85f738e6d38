"""Chunk the model: outputs of all rows, activations of one micro-batch."""

from gradaccum.torch.chunking.chunked import chunked

__all__ = ["chunked"]
