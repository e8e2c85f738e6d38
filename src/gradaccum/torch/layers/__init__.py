"""Layer by layer: the blocks of a model in turn, each over all micro-batches, in the backward pass."""

from gradaccum.torch.layers.blocks import BlocksChoice
from gradaccum.torch.layers.in_turn import InTurn
from gradaccum.torch.layers.offload import OffloadChoice
from gradaccum.torch.layers.options import UpdateChoice, check_in_backward, check_options
from gradaccum.torch.layers.schedule import Layers, proof_of

__all__ = [
    "BlocksChoice",
    "InTurn",
    "Layers",
    "OffloadChoice",
    "UpdateChoice",
    "check_in_backward",
    "check_options",
    "proof_of",
]
