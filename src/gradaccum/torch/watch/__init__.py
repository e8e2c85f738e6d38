"""Watch an open window's gradients and parameters: what a loop does to them behind the wrapper's back is named."""

from gradaccum.torch.watch.messages import (
    callers,
    check_outside_of_trainers,
    failed_error,
    is_of_the_user,
    level_of_the_user,
    modification_error,
    untouched_error,
)
from gradaccum.torch.watch.monitor import GradientMonitor, Modification, ShardedMonitor, Values, counts_versions
from gradaccum.torch.watch.parameters import ParameterMonitor, parameters_of

__all__ = [
    "GradientMonitor",
    "Modification",
    "ParameterMonitor",
    "ShardedMonitor",
    "Values",
    "callers",
    "check_outside_of_trainers",
    "counts_versions",
    "failed_error",
    "is_of_the_user",
    "level_of_the_user",
    "modification_error",
    "parameters_of",
    "untouched_error",
]
