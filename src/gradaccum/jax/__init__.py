"""The large batch's update in JAX, in the memory of a micro-batch: functions that go inside your own `jax.jit`.

- `value_and_grad`, `grad`: split the batch, if it is the large one.
- `windowed`: wrap the optimizer, an optax transformation, in a loop that runs small batches.
- `chunked`: chunk the model, if the loss looks across the batch; `losses` has such losses in tiles.
- `check_equivalence`: whether micro-batches make the large batch's update, and if not, why.
"""

from gradaccum.extras import require

require("jax")
require("optax")

from gradaccum.jax import losses
from gradaccum.jax.check import check_equivalence
from gradaccum.jax.chunking import chunked
from gradaccum.jax.optimizer import noise_scale, updated, windowed
from gradaccum.jax.train_step import grad, value_and_grad

__all__ = ["check_equivalence", "chunked", "grad", "losses", "noise_scale", "updated", "value_and_grad", "windowed"]
