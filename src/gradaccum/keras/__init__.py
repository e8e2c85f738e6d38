"""The large batch's update in Keras 3, on TensorFlow, JAX and PyTorch, in the memory of a micro-batch.

- `optimizers`: wrap the optimizer, in a `fit` with small batches; `callbacks` closes windows with their epochs.
- `micro_batched`: split the batch, in a `fit` with large ones.
- `chunked`: chunk the model, if the loss looks across the batch; `losses` has such losses in tiles.
- `check_equivalence`: whether micro-batches make the large batch's update, and if not, why.
"""

from gradaccum.extras import require

require("keras")

from gradaccum.keras import callbacks, losses, optimizers
from gradaccum.keras.check import check_equivalence
from gradaccum.keras.chunking import chunked
from gradaccum.keras.micro_batched import micro_batched

__all__ = ["callbacks", "check_equivalence", "chunked", "losses", "micro_batched", "optimizers"]
