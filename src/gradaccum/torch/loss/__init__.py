"""What a loss divides by, and how micro-batches add up to the large batch's."""

from gradaccum.torch.loss.accumulator import LossAccumulator, NamedBuffer
from gradaccum.torch.loss.batch_losses import BatchLosses, WeightedLoss, batch_losses, counted
from gradaccum.torch.loss.named import (
    MIXED_TERMS,
    Term,
    Terms,
    Totals,
    Weight,
    checked_scalar,
    checked_terms,
    mixed_terms_error,
    not_by_name_error,
)
from gradaccum.torch.loss.objective import Objective

__all__ = [
    "MIXED_TERMS",
    "BatchLosses",
    "LossAccumulator",
    "NamedBuffer",
    "Objective",
    "Term",
    "Terms",
    "Totals",
    "Weight",
    "WeightedLoss",
    "batch_losses",
    "checked_scalar",
    "checked_terms",
    "counted",
    "mixed_terms_error",
    "not_by_name_error",
]
