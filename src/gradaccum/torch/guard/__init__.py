"""Watch the sum of an open window: whatever happens to it behind the wrapper's back is noticed, and named."""

from gradaccum.torch.guard.groups import ParameterGroups, are, parameters_of
from gradaccum.torch.guard.guard import Guard
from gradaccum.torch.guard.messages import failed_error, tampering_error, untouched_error
from gradaccum.torch.guard.watched import all_require_grad

__all__ = [
    "Guard",
    "ParameterGroups",
    "all_require_grad",
    "are",
    "failed_error",
    "parameters_of",
    "tampering_error",
    "untouched_error",
]
