"""State that moves in the forward pass: how to put it back, and where several passes from one start lead together."""

from gradaccum.torch.buffers.chosen import choose_rules, tell_of_buffers
from gradaccum.torch.buffers.lent import LentBuffers
from gradaccum.torch.buffers.module_state import (
    Attributes,
    ModuleState,
    gradients_kept,
    left_as_found,
    owners_of_buffers,
)
from gradaccum.torch.buffers.rules import combine_buffers
from gradaccum.torch.buffers.taken_over import take_over
from gradaccum.torch.buffers.window import WindowBuffers

__all__ = [
    "Attributes",
    "LentBuffers",
    "ModuleState",
    "WindowBuffers",
    "choose_rules",
    "combine_buffers",
    "gradients_kept",
    "left_as_found",
    "owners_of_buffers",
    "take_over",
    "tell_of_buffers",
]
