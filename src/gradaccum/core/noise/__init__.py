"""How many rows an update can use: the gradient noise scale, and windows that follow it."""

from gradaccum.core.noise.scale import WINDOWS, NoiseScale, Norms, estimate
from gradaccum.core.noise.schedule import AnySteps, NoiseSchedule, schedule_of

__all__ = [
    "WINDOWS",
    "AnySteps",
    "NoiseScale",
    "NoiseSchedule",
    "Norms",
    "estimate",
    "schedule_of",
]
