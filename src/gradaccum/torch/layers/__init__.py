"""Layer by layer: the blocks of a model in turn, each over all micro-batches, in the backward pass."""

from gradaccum.torch.layers.blocks import BlocksChoice, has_blocks
from gradaccum.torch.layers.offload import OffloadChoice
from gradaccum.torch.layers.options import UpdateChoice, check_in_backward, check_options
from gradaccum.torch.layers.proof import proof_of
from gradaccum.torch.layers.schedule import Layers
from gradaccum.torch.layers.updates import Ahead, InTurn, Turns, turns
from gradaccum.torch.layers.visits import BlocksOn

__all__ = [
    "Ahead",
    "BlocksChoice",
    "BlocksOn",
    "InTurn",
    "Layers",
    "OffloadChoice",
    "Turns",
    "UpdateChoice",
    "check_in_backward",
    "check_options",
    "has_blocks",
    "proof_of",
    "turns",
]
