"""Prove it: accumulated and large batch compared, and the culprit named."""

from gradaccum.torch.equivalence.certificate import certify
from gradaccum.torch.equivalence.comparison import largest, relative_error

__all__ = ["certify", "largest", "relative_error"]
