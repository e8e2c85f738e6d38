"""Prove it: what the large batch and its micro-batches give, compared, and the culprit named."""

from gradaccum.keras.equivalence.causes import find_causes
from gradaccum.keras.equivalence.outcome import Outcome, as_array, precision_of
from gradaccum.keras.equivalence.random_numbers import Draws, held

__all__ = ["Draws", "Outcome", "as_array", "find_causes", "held", "precision_of"]
