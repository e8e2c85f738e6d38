"""Logits over huge vocabularies that never exist: the head and the loss in tiles."""

from gradaccum.torch.head.module import Head, tiling

__all__ = ["Head", "tiling"]
