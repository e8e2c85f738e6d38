"""Wrap the optimizer: a loop that runs small batches makes the large batch's updates."""

from gradaccum.torch.optimizer.batches import BatchWeight
from gradaccum.torch.optimizer.optimizer import Optimizer
from gradaccum.torch.optimizer.proxy import KEY

__all__ = ["KEY", "BatchWeight", "Optimizer"]
