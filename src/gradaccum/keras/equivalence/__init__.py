"""Prove it: what the large batch and its micro-batches give, compared, and the culprit named."""

from gradaccum.keras.equivalence.causes import find_causes, mixing_layers
from gradaccum.keras.equivalence.layer_calls import recorded_calls
from gradaccum.keras.equivalence.outcome import Evaluation, StepRunner, as_array, precision_of
from gradaccum.keras.equivalence.random_numbers import Draws, held

__all__ = [
    "Draws",
    "Evaluation",
    "StepRunner",
    "as_array",
    "find_causes",
    "held",
    "mixing_layers",
    "precision_of",
    "recorded_calls",
]
