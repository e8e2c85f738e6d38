"""Sizes without a device at hand, and the record of a run."""

from gradaccum.torch.measure.estimates import (
    SIZE_KEYWORDS,
    estimate_size,
    estimate_ways,
    largest_fitting,
    suggest_micro_batch_size,
)
from gradaccum.torch.measure.recorder import Recorder

__all__ = [
    "SIZE_KEYWORDS", "Recorder", "estimate_size", "estimate_ways", "largest_fitting", "suggest_micro_batch_size",
]  # fmt: skip
