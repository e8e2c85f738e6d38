"""Where the rows of a batch are, and how micro-batches are taken from it."""

from gradaccum.jax.batch.arguments import argument_numbers, axes_of_each
from gradaccum.jax.batch.jaxprs import drawn_shapes, equations
from gradaccum.jax.batch.norms import squared_norm
from gradaccum.jax.batch.rows import Batch, Group, spread
from gradaccum.jax.batch.types import as_varying, like, varying_axes, zeros

__all__ = [
    "Batch",
    "Group",
    "argument_numbers",
    "as_varying",
    "axes_of_each",
    "drawn_shapes",
    "equations",
    "like",
    "spread",
    "squared_norm",
    "varying_axes",
    "zeros",
]
