"""Watch the sum of an open window: whatever happens to it behind the wrapper's back is noticed, and named."""

from gradaccum.torch.guard.guard import Guard
from gradaccum.torch.guard.messages import failed_error, tampering_error, untouched_error

__all__ = ["Guard", "failed_error", "tampering_error", "untouched_error"]
