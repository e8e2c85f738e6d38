"""Loops over the micro-batches of a batch, on each backend: those of a training step and of a chunked layer."""

from gradaccum.keras.loops.rows import Spec, has_rows

__all__ = ["Spec", "has_rows"]
