"""State that moves in the forward pass: several passes from one start, and where they lead together."""

from gradaccum.torch.buffers.chosen import choose_rules, tell_of_buffers
from gradaccum.torch.buffers.lent import LentBuffers
from gradaccum.torch.buffers.rules import combine_buffers
from gradaccum.torch.buffers.taken_over import take_over
from gradaccum.torch.buffers.window import WindowBuffers

__all__ = ["LentBuffers", "WindowBuffers", "choose_rules", "combine_buffers", "take_over", "tell_of_buffers"]
