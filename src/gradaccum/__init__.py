"""Train with the batch size you want on the memory you have, and get the same update.

The centre is plain Python and imports no framework. The ways in are `gradaccum.torch`, `gradaccum.keras` and
`gradaccum.jax`.
"""

from gradaccum.errors import NotEquivalentError, WindowError
from gradaccum.noise import NoiseSchedule
from gradaccum.schedule import Schedule, steps_for

__all__ = ["NoiseSchedule", "NotEquivalentError", "Schedule", "WindowError", "__version__", "steps_for"]

__version__ = "0.1.0"
