"""Which stages a window ends with, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from gradaccum.on_torch.noise.meter import NoiseMeter
from gradaccum.on_torch.stages.cast import Cast
from gradaccum.on_torch.stages.clip_norm import ClipNorm
from gradaccum.on_torch.stages.clip_value import ClipValue
from gradaccum.on_torch.stages.divide import Divide
from gradaccum.on_torch.stages.finite import Finite
from gradaccum.on_torch.stages.noise import MeasureNoise
from gradaccum.on_torch.stages.total import Stage

__all__ = ["gradient_stages"]


def gradient_stages(
    *first: Stage | None,
    before_clipping: Iterable[Stage] = (),
    skip_nonfinite: bool = False,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    noise: NoiseMeter | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    accumulates_wide: bool = False,
) -> list[Stage]:
    """The stages that were asked for: a plain loop's are `[Divide]`."""
    stages = [
        *first,
        Divide(),
        Finite(sum_over_ranks) if skip_nonfinite else None,
        MeasureNoise(noise) if noise is not None else None,
        *before_clipping,
        ClipNorm(clip_grad_norm) if clip_grad_norm is not None else None,
        ClipValue(clip_grad_value) if clip_grad_value is not None else None,
        Cast() if accumulates_wide else None,
    ]
    return [stage for stage in stages if stage is not None]
