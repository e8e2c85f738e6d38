"""Prove it: accumulated and large batch compared, and the culprit named."""

from gradaccum.torch.equivalence.check import check_equivalence
from gradaccum.torch.equivalence.comparison import largest, relative_error

__all__ = ["check_equivalence", "largest", "relative_error"]
