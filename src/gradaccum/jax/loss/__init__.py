"""What a loss makes of its rows: a mean over them, a sum, or something that takes all of them at once."""

from gradaccum.jax.loss.judge import LossSpec, Verdict, judge
from gradaccum.jax.loss.walk import DIFFERENTIATED, FRESH, STATE

__all__ = ["DIFFERENTIATED", "FRESH", "STATE", "LossSpec", "Verdict", "judge"]
