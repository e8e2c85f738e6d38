"""Chunk the model: any loss on all outputs, in the memory of a few rows."""
