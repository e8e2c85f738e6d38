"""Prove it: accumulated and large batch compared, and the culprit named."""

from gradaccum.torch.equivalence.causes import counting_layers
from gradaccum.torch.equivalence.certificate import certify
from gradaccum.torch.equivalence.outcome import relative_error
from gradaccum.torch.equivalence.proof import Proof, eager
from gradaccum.torch.equivalence.row_randomness import Replay

__all__ = [
    "Proof",
    "Replay",
    "certify",
    "counting_layers",
    "eager",
    "relative_error",
]
