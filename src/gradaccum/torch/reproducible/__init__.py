"""The same bits on any number of ranks: rows, random numbers and sums that depend on the global batch alone."""

from gradaccum.torch.reproducible.sampler import GlobalBatchSampler

__all__ = ["GlobalBatchSampler"]
