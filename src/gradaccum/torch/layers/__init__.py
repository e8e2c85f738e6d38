"""Layer by layer: the blocks of a model in turn, each over all micro-batches, in the backward pass."""

from gradaccum.torch.layers.estimates import estimate_ways
from gradaccum.torch.layers.step import BlockStep

__all__ = ["BlockStep", "estimate_ways"]
