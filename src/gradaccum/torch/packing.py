"""Functions for `TrainStep(pack=...)`, which join rows without padding."""

from gradaccum.torch.padding import causal_lm

__all__ = ["causal_lm"]
