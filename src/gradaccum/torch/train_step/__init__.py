"""Split the batch: the large batch goes in, one exact update comes out, in micro-batches that fit."""

from gradaccum.torch.train_step.options import GroupsChoice, check_exact, checked_groups, with_groups
from gradaccum.torch.train_step.train_step import TrainStep

__all__ = ["GroupsChoice", "TrainStep", "check_exact", "checked_groups", "with_groups"]
