"""What a loss divides by, how micro-batches add up to the large batch's, and whether they do."""

from gradaccum.torch.loss.accumulator import LossAccumulator, WeightedLoss
from gradaccum.torch.loss.additivity import same_gradient, undisturbed, verify_additivity
from gradaccum.torch.loss.divisors import Weight
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.loss.window_loss import WindowLoss

__all__ = [
    "LossAccumulator",
    "Objective",
    "Weight",
    "WeightedLoss",
    "WindowLoss",
    "same_gradient",
    "undisturbed",
    "verify_additivity",
]
