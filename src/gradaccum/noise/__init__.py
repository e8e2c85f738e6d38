"""How many rows an update can use: the gradient noise scale, and windows that follow it."""

from gradaccum.noise.scale import WINDOWS, NoiseScale, Norms, effective_size, estimate
from gradaccum.noise.schedule import AnySteps, NoiseSchedule, schedule_of

__all__ = [
    "WINDOWS",
    "AnySteps",
    "NoiseScale",
    "NoiseSchedule",
    "Norms",
    "effective_size",
    "estimate",
    "schedule_of",
]
