"""What a loss divides by, and whether micro-batches add up to the large batch."""

from gradaccum.keras.loss.additivity import coupled_losses
from gradaccum.keras.loss.divisors import Measured, divisors_of, update_trackers, weighed_losses
from gradaccum.keras.loss.gradients import value_and_gradients

__all__ = ["Measured", "coupled_losses", "divisors_of", "update_trackers", "value_and_gradients", "weighed_losses"]
