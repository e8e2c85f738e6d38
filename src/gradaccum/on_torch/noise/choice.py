"""How the noise scale is measured."""

from __future__ import annotations

from typing import Literal

from torch import nn

from gradaccum.on_torch.noise.meter import NoiseMeter
from gradaccum.on_torch.noise.normalization import NormalizationMeter

__all__ = ["NoiseChoice", "checked_noise", "noise_meter"]

NoiseChoice = Literal[False, True, "layer_norm"]
"""Whether the noise scale is measured; by which gradients, if not by all."""


def checked_noise(noise_scale: NoiseChoice, nonfinite: str = "propagate") -> NoiseChoice:
    """Whether the noise scale is measured, and how."""
    if not isinstance(noise_scale, bool) and noise_scale != "layer_norm":
        raise ValueError(f"`noise_scale` must be a bool or 'layer_norm'. Received: noise_scale={noise_scale!r}.")
    if noise_scale == "layer_norm" and nonfinite == "skip_micro_batch":
        raise ValueError(
            'noise_scale="layer_norm" compares rows with `.grad`, and nonfinite="skip_micro_batch" keeps the sum '
            "beside it. Use noise_scale=True."
        )
    return noise_scale


def noise_meter(noise_scale: NoiseChoice | None, model: nn.Module | None) -> NoiseMeter | None:
    """What measures the noise scale as it was asked for: nothing, gradients of two sizes, or normalization layers."""
    if noise_scale != "layer_norm":
        return NoiseMeter() if noise_scale else None
    if model is None:
        raise ValueError('noise_scale="layer_norm" looks at the model\'s layers. Pass `model` as well.')
    return NormalizationMeter(model)
