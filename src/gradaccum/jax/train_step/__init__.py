"""Split the batch: the large batch's loss and gradient, in the memory of a micro-batch."""

from gradaccum.jax.train_step.gradients import grad, value_and_grad
from gradaccum.jax.train_step.verify import judge_loss, known_exact

__all__ = ["grad", "judge_loss", "known_exact", "value_and_grad"]
