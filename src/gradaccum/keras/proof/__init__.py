"""What Keras' shell adds to the proof of `gradaccum.core`: rows run by a training step, and why they differ."""

from gradaccum.keras.proof.causes import find_causes, mixing_layers, parts_of, recorded_calls
from gradaccum.keras.proof.held import Draws, held
from gradaccum.keras.proof.runner import StepRunner, outcome_of, precision_of

__all__ = [
    "Draws", "StepRunner", "find_causes", "held", "mixing_layers", "outcome_of", "parts_of", "precision_of",
    "recorded_calls",
]  # fmt: skip
