"""Windows of gradient accumulation: count, add weights, and at the end run the stages and the inner step."""

from gradaccum.torch.window.gradient_window import GradientWindow, Nonfinite
from gradaccum.torch.window.loss_scale import LossScale
from gradaccum.torch.window.windows import RUNNING, Windows, on_collect

__all__ = ["RUNNING", "GradientWindow", "LossScale", "Nonfinite", "Windows", "on_collect"]
