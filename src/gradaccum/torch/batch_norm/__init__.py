"""What is done about BatchNorm."""

from gradaccum.torch.batch_norm.policy import (
    BatchNormChoice,
    BatchNormPolicy,
    Pool,
    batch_norms,
    checked_batch_norm,
    frozen,
    move_running_statistics,
    ranks_of,
    summed_over_ranks,
    warn_of_batch_norm,
)

__all__ = [
    "BatchNormChoice",
    "BatchNormPolicy",
    "Pool",
    "batch_norms",
    "checked_batch_norm",
    "frozen",
    "move_running_statistics",
    "ranks_of",
    "summed_over_ranks",
    "warn_of_batch_norm",
]
