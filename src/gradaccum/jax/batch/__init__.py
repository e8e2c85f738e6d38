"""Where the rows of a batch are, and how micro-batches are taken from it."""

from gradaccum.jax.batch.arrays import as_varying, drawn_shapes, equations, like, squared_norm, varying_axes, zeros
from gradaccum.jax.batch.rows import Batch, Group, argument_names, argument_numbers, axes_of_each, over, spread

__all__ = [
    "Batch", "Group", "argument_names", "argument_numbers", "as_varying", "axes_of_each", "drawn_shapes", "equations",
    "like", "over", "spread", "squared_norm", "varying_axes", "zeros",
]  # fmt: skip
