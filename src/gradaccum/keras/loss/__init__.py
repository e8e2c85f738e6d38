"""What a loss divides by, and whether micro-batches add up to the large batch."""

from gradaccum.keras.loss.additivity import check_additive, not_additive
from gradaccum.keras.loss.divisors import Measured, denominators_of, tell_trackers, weighed_losses

__all__ = ["Measured", "check_additive", "denominators_of", "not_additive", "tell_trackers", "weighed_losses"]
