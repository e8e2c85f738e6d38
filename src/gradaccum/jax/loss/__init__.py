"""What a loss makes of its rows: a mean over them, a sum, or something that takes all of them at once."""

from gradaccum.jax.loss.verdict import Judged, Verdict, judge

__all__ = ["Judged", "Verdict", "judge"]
