"""Prove it: accumulated and large batch compared, and the culprit named."""

from gradaccum.torch.proof.causes import counting_layers
from gradaccum.torch.proof.proof import Proof, certify, eager

__all__ = ["Proof", "certify", "counting_layers", "eager"]
