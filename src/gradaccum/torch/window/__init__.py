"""Windows of gradient accumulation: count, add weights, and at the end run the stages and the inner step."""

from gradaccum.torch.window.gradient_window import GradientWindow, Nonfinite
from gradaccum.torch.window.loss_scale import LossScale
from gradaccum.torch.window.windows import OtherLoops, Windows, on_collect

__all__ = ["GradientWindow", "LossScale", "Nonfinite", "OtherLoops", "Windows", "on_collect"]
