"""Split the batch: the large batch's loss and gradient, in the memory of a micro-batch."""

from gradaccum.jax.train_step.gradients import grad, value_and_grad

__all__ = ["grad", "value_and_grad"]
