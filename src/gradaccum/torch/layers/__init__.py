"""Layer by layer: the blocks of a model in turn, each over all micro-batches, in the backward pass."""

from gradaccum.torch.layers.backward_optimizer import BackwardOptimizer, parameters_by_block
from gradaccum.torch.layers.blocks import Blocks, BlocksChoice, check_in_backward, checked_blocks, has_blocks
from gradaccum.torch.layers.offload import OffloadChoice
from gradaccum.torch.layers.schedule import Layers, proof_of

__all__ = [
    "BackwardOptimizer", "Blocks", "BlocksChoice", "Layers", "OffloadChoice", "check_in_backward", "checked_blocks",
    "has_blocks", "parameters_by_block", "proof_of",
]  # fmt: skip
