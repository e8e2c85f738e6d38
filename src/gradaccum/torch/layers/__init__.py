"""Layer by layer: the blocks of a model in turn, each over all micro-batches, in the backward pass."""

from gradaccum.torch.layers.blocks import BlocksChoice
from gradaccum.torch.layers.options import check_options
from gradaccum.torch.layers.schedule import Layers, proof_of

__all__ = ["BlocksChoice", "Layers", "check_options", "proof_of"]
