"""A window as a compiled program: `TrainStep(compile=True)`."""

from gradaccum.torch.compiled.feature import add_to

__all__ = ["add_to"]
