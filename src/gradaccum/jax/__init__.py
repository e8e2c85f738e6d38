"""gradaccum for JAX: functions that go inside your own `jax.jit`."""

from gradaccum.extras import require

require("jax")

from gradaccum.jax.train_step import grad, value_and_grad

__all__ = ["grad", "value_and_grad"]
