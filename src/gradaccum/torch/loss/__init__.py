"""What a loss divides by, and how micro-batches add up to the large batch's."""

from gradaccum.torch.loss.batch_losses import BatchLosses, WeightedLoss, batch_losses, counted
from gradaccum.torch.loss.named import (
    MIXED_TERMS,
    Term,
    Terms,
    Totals,
    Weight,
    plain_weight,
)
from gradaccum.torch.loss.objective import Objective

__all__ = [
    "MIXED_TERMS",
    "BatchLosses",
    "Objective",
    "Term",
    "Terms",
    "Totals",
    "Weight",
    "WeightedLoss",
    "batch_losses",
    "counted",
    "plain_weight",
]
