"""Chunk the model: any loss on all outputs, in the memory of a few rows."""

from gradaccum.keras.chunking.body import Body, two_passes
from gradaccum.keras.chunking.chunked import chunked

__all__ = ["Body", "chunked", "two_passes"]
