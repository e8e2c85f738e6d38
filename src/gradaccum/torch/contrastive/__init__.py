"""Contrastive losses over all pairs of rows, one tile at a time, and over ranks."""

from gradaccum.torch.contrastive.losses import info_nce, sigmoid_loss

__all__ = ["info_nce", "sigmoid_loss"]
