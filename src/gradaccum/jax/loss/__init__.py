"""What a loss makes of its rows: a mean over them, a sum, or something that takes all of them at once."""

from gradaccum.jax.loss.algebra import DIFFERENTIATED, FRESH, STATE
from gradaccum.jax.loss.judge import LossSpec, Verdict, judge

__all__ = ["DIFFERENTIATED", "FRESH", "STATE", "LossSpec", "Verdict", "judge"]
