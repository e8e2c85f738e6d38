"""Windows of gradient accumulation: count, add weights, and at the end run the stages and the inner step."""

from gradaccum.torch.window.gradient_window import GradientWindow, Nonfinite, checked_nonfinite
from gradaccum.torch.window.loss_scale import LossScale
from gradaccum.torch.window.make import make_windows
from gradaccum.torch.window.windows import Windows

__all__ = ["GradientWindow", "LossScale", "Nonfinite", "Windows", "checked_nonfinite", "make_windows"]
