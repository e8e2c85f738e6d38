"""Chunk the model: any loss on all outputs, in the memory of a few rows."""

from gradaccum.keras.chunking.body import Body
from gradaccum.keras.chunking.chunked import chunked
from gradaccum.keras.chunking.passes import two_passes

__all__ = ["Body", "chunked", "two_passes"]
