"""Sizes without a device at hand, and the record of a run."""

from gradaccum.torch.measure.recorder import Recorder
from gradaccum.torch.measure.suggest import DoesNotFit, estimate_size, suggest_micro_batch_size

__all__ = ["DoesNotFit", "Recorder", "estimate_size", "suggest_micro_batch_size"]
