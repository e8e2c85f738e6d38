"""State that moves in the forward pass: several passes from one start, and where they lead together."""

from gradaccum.torch.buffers.moved import Moved, move_all
from gradaccum.torch.buffers.rules import combine_buffers, rules_of
from gradaccum.torch.buffers.window import WindowBuffers

__all__ = ["Moved", "WindowBuffers", "combine_buffers", "move_all", "rules_of"]
