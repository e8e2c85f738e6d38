"""Rows without padding: what `TrainStep(pack=...)` lays one behind the other."""

from gradaccum.torch.padding import causal_lm

__all__ = ["causal_lm"]
