"""gradaccum for JAX: functions that go inside your own `jax.jit`."""

from gradaccum.extras import require

require("jax")
require("optax")

from gradaccum.jax import losses
from gradaccum.jax.chunking import chunked
from gradaccum.jax.equivalence import check_equivalence
from gradaccum.jax.optimizer import noise_scale, updated, windowed
from gradaccum.jax.train_step import grad, value_and_grad

__all__ = ["check_equivalence", "chunked", "grad", "losses", "noise_scale", "updated", "value_and_grad", "windowed"]
