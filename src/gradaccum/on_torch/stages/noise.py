"""Measure the gradient noise scale on the finished gradient, before clipping."""

from __future__ import annotations

from gradaccum.on_torch.noise.meter import NoiseMeter
from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["MeasureNoise"]


class MeasureNoise:
    """Shows a meter the window's gradient."""

    def __init__(self, meter: NoiseMeter) -> None:
        self._meter = meter

    def __call__(self, total: WindowTotal) -> bool:
        self._meter.window(total.gradients, total.rows, total.multiple)
        return True
