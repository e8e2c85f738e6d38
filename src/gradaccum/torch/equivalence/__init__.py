"""Prove it: accumulated and large batch compared, and the culprit named."""

from gradaccum.torch.equivalence.check import check_equivalence

__all__ = ["check_equivalence"]
