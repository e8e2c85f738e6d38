"""What the large batch and its micro-batches give, for a proof; and what makes the difference, by name."""

from gradaccum.keras.equivalence.causes import find_causes, mixing_layers, recorded_calls
from gradaccum.keras.equivalence.runner import Draws, StepRunner, as_array, held, outcome_of, precision_of, take_rows

__all__ = [
    "Draws", "StepRunner", "as_array", "find_causes", "held", "mixing_layers", "outcome_of", "precision_of",
    "recorded_calls", "take_rows",
]  # fmt: skip
