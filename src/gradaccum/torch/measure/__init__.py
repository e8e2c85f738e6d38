"""Sizes without a device at hand, and the record of a run."""

from gradaccum.torch.measure.recorder import Recorder
from gradaccum.torch.measure.sharded import largest_fitting
from gradaccum.torch.measure.suggest import (
    SIZE_KEYWORDS,
    DoesNotFit,
    estimate_size,
    estimate_ways,
    suggest_micro_batch_size,
)

__all__ = [
    "SIZE_KEYWORDS",
    "DoesNotFit",
    "Recorder",
    "estimate_size",
    "estimate_ways",
    "largest_fitting",
    "suggest_micro_batch_size",
]
