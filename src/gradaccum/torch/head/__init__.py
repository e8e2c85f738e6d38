"""A linear head over a huge vocabulary and its cross entropy, a tile of rows at a time."""

from gradaccum.torch.head.logits import Head, tiling

__all__ = ["Head", "tiling"]
