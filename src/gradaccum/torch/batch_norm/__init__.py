"""What is done about BatchNorm."""

from gradaccum.torch.batch_norm.layers import (
    batch_norms,
    check_plain,
    frozen,
    in_eval_mode,
    is_of_the_user,
    ranks_of,
    summed_over_ranks,
    warn_of_batch_norm,
    warn_of_functional_batch_norm,
)
from gradaccum.torch.batch_norm.policy import BatchNormChoice, BatchNormPolicy, checked_batch_norm
from gradaccum.torch.batch_norm.statistics import Pool, PooledStatistics, move_running_statistics

__all__ = [
    "BatchNormChoice",
    "BatchNormPolicy",
    "Pool",
    "PooledStatistics",
    "batch_norms",
    "check_plain",
    "checked_batch_norm",
    "frozen",
    "in_eval_mode",
    "is_of_the_user",
    "move_running_statistics",
    "ranks_of",
    "summed_over_ranks",
    "warn_of_batch_norm",
    "warn_of_functional_batch_norm",
]
