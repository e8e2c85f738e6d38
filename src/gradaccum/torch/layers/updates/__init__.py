"""Updates while backward goes on: each block's parameters as soon as their gradient is finished."""

from gradaccum.torch.layers.updates.ahead import Ahead
from gradaccum.torch.layers.updates.in_turn import InTurn, Turns, Window, turns

__all__ = ["Ahead", "InTurn", "Turns", "Window", "turns"]
