"""Parameters in turn: blocks that live in host memory, or in files, each of which visits the device to compute."""

from gradaccum.torch.layers.visits.companions import Companions
from gradaccum.torch.layers.visits.visits import BlocksOn, Visits

__all__ = ["BlocksOn", "Companions", "Visits"]
