"""gradaccum for Keras 3, on TensorFlow, JAX and PyTorch."""

from gradaccum.extras import require

require("keras")

from gradaccum.keras import callbacks, losses, optimizers
from gradaccum.keras.check import check_equivalence
from gradaccum.keras.chunking import chunked
from gradaccum.keras.micro_batched import micro_batched

__all__ = ["callbacks", "check_equivalence", "chunked", "losses", "micro_batched", "optimizers"]
