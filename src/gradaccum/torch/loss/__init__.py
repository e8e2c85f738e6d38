"""What a loss divides by, and how micro-batches add up to the large batch's."""

from gradaccum.torch.loss.accumulator import LossAccumulator, WeightedLoss
from gradaccum.torch.loss.divisors import Weight
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.loss.window_loss import WindowLoss

__all__ = [
    "LossAccumulator",
    "Objective",
    "Weight",
    "WeightedLoss",
    "WindowLoss",
]
