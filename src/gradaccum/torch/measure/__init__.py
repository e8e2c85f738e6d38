"""Sizes without a device at hand, and the record of a run."""

from gradaccum.torch.measure.estimates import (
    SIZE_KEYWORDS,
    SMALLER,
    Subject,
    estimate_size,
    largest_fitting,
    subject_of,
    suggest_micro_batch_size,
)
from gradaccum.torch.measure.recorder import Recorder

__all__ = [
    "SIZE_KEYWORDS", "SMALLER", "Recorder", "Subject", "estimate_size", "largest_fitting", "subject_of",
    "suggest_micro_batch_size",
]  # fmt: skip
