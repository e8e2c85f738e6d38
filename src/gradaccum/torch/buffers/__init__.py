"""State that moves in the forward pass: how to put it back, and where several passes from one start lead together."""

from gradaccum.torch.buffers.module_state import (
    Attributes,
    ModuleContents,
    ModuleState,
    gradients_kept,
    left_as_found,
    owners_of_buffers,
)
from gradaccum.torch.buffers.moves import LentBuffers, WindowBuffers, take_over
from gradaccum.torch.buffers.rules import combine_buffers, warn_of_buffers

__all__ = [
    "Attributes",
    "LentBuffers",
    "ModuleContents",
    "ModuleState",
    "WindowBuffers",
    "combine_buffers",
    "gradients_kept",
    "left_as_found",
    "owners_of_buffers",
    "take_over",
    "warn_of_buffers",
]
