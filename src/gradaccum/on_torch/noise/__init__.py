"""Measure the gradient noise scale while training: by gradients of two sizes, or by rows in normalization layers."""

from gradaccum.on_torch.noise.choice import NoiseChoice, checked_noise, noise_meter
from gradaccum.on_torch.noise.meter import NoiseMeter, inside_step

__all__ = ["NoiseChoice", "NoiseMeter", "checked_noise", "inside_step", "noise_meter"]
