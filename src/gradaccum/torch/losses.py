"""Losses over all pairs of the large batch's rows, in memory that is linear in the rows."""

from gradaccum.torch.contrastive import info_nce, sigmoid_loss

__all__ = ["info_nce", "sigmoid_loss"]
