"""What a loss divides by, and how micro-batches add up to the large batch's."""

from gradaccum.torch.loss.accumulator import LossAccumulator, WeightedLoss
from gradaccum.torch.loss.divisors import Weight
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.loss.term_sums import (
    NamedLoss,
    TermSums,
    checked_terms,
    late_names_error,
    mixed_terms_error,
    not_by_name_error,
    unscaled_terms_error,
)
from gradaccum.torch.loss.terms import MIXED_TERMS, Term, Terms, Totals, checked_scalar
from gradaccum.torch.loss.terms_accumulator import TermsAccumulator, accumulator, counted
from gradaccum.torch.loss.window_loss import WindowLoss

__all__ = [
    "MIXED_TERMS",
    "LossAccumulator",
    "NamedLoss",
    "Objective",
    "Term",
    "TermSums",
    "Terms",
    "TermsAccumulator",
    "Totals",
    "Weight",
    "WeightedLoss",
    "WindowLoss",
    "accumulator",
    "checked_scalar",
    "checked_terms",
    "counted",
    "late_names_error",
    "mixed_terms_error",
    "not_by_name_error",
    "unscaled_terms_error",
]
