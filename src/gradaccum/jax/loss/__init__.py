"""What a loss makes of its rows: a mean over them, a sum, or something that takes all of them at once."""

from gradaccum.jax.loss.judge import LossSpec, Verdict, judge
from gradaccum.jax.loss.walk import Tag

__all__ = ["LossSpec", "Tag", "Verdict", "judge"]
