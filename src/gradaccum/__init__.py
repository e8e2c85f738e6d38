"""Train with the batch size you want on the memory you have, and get the same update.

This module imports no framework. The ways in are `gradaccum.torch`, `gradaccum.keras` and `gradaccum.jax`.
"""

from gradaccum.errors import NotEquivalentError, WindowError
from gradaccum.lazy import when_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gradaccum.schedule import Schedule, steps_for
else:
    __getattr__, __dir__ = when_used(
        __name__,
        {
            "Schedule": "gradaccum.schedule",
            "steps_for": "gradaccum.schedule",
        },
        {
            "BlockStep": "It is gradaccum.torch.BlockStep.",
            "MicroBatchTrainer": "It is gradaccum.integrations.transformers.MicroBatchTrainer.",
            "NoiseSchedule": "It was removed: set optimizer.steps between windows, by optimizer.noise_scale.",
            "Optimizer": "It is gradaccum.torch.optim.Optimizer or gradaccum.keras.optimizers.Optimizer.",
            "TrainStep": "It is gradaccum.torch.TrainStep.",
            "check_equivalence": "It is in gradaccum.torch, gradaccum.keras and gradaccum.jax.",
            "chunked": "It is in gradaccum.torch, gradaccum.keras and gradaccum.jax.",
            "micro_batched": "It is gradaccum.keras.micro_batched.",
            "optim": "It is gradaccum.torch.optim.",
            "optimizers": "It is gradaccum.keras.optimizers.",
            "value_and_grad": "It is gradaccum.jax.value_and_grad.",
            "windowed": "It is gradaccum.jax.windowed.",
            **{
                name: f"Import it first: import gradaccum.{name}"
                for name in ("integrations", "jax", "keras", "report", "torch")
            },
        },
    )

__all__ = ["NotEquivalentError", "Schedule", "WindowError", "__version__", "steps_for"]

__version__ = "0.2.0"
