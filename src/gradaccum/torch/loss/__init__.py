"""What a loss divides by, and how micro-batches add up to the large batch's."""

from gradaccum.torch.loss.accumulator import LossAccumulator, WeightedLoss, accumulator, counted
from gradaccum.torch.loss.named import (
    MIXED_TERMS,
    NamedSums,
    Term,
    Terms,
    Totals,
    Weight,
    WindowLosses,
    checked_scalar,
    checked_terms,
    mixed_terms_error,
    not_by_name_error,
)
from gradaccum.torch.loss.objective import Objective, referred

__all__ = [
    "MIXED_TERMS",
    "LossAccumulator",
    "NamedSums",
    "Objective",
    "Term",
    "Terms",
    "Totals",
    "Weight",
    "WeightedLoss",
    "WindowLosses",
    "accumulator",
    "checked_scalar",
    "checked_terms",
    "counted",
    "mixed_terms_error",
    "not_by_name_error",
    "referred",
]
