"""`runai.ga.torch.optim`: `Optimizer` around any optimizer, and torch's own by name, wrapped already."""

from __future__ import annotations

import weakref
from typing import Any

import torch

import gradaccum.torch.optim
from runai.ga.window import Window

__all__ = ["Optimizer"]


class _RunAI:
    """What the original's optimizers said and showed."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        how = "summed" if kwargs.get("reduction") == "sum" else "averaged"
        name = type(self.inner).__name__
        print(f"Wrapping '{name}' PyTorch optimizer with GA of {self.steps} steps (gradients are {how})")

    def _hold(self: Any, inner: torch.optim.Optimizer) -> None:
        super()._hold(inner)  # type: ignore[misc]  # of the optimizer beside it
        vars(inner)["runai"] = Window(weakref.proxy(self))  # for a custom optimizer that reads it in its step

    @property
    def optimizer(self: Any) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self.inner

    @property
    def runai(self) -> Window:
        """`.steps` and `.step` of the window."""
        return Window(self)


class Optimizer(_RunAI, gradaccum.torch.optim.Optimizer):
    """`gradaccum.torch.optim.Optimizer`, as Run:AI's library had it: `Optimizer(optimizer, steps=4)`.

    Gradients are averaged over a window. The original summed them: `reduction="sum"` does.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
        Wrapping 'SGD' PyTorch optimizer with GA of 4 steps (gradients are averaged)
        >>> optimizer.runai.steps, optimizer.runai.step
        (4, 0)
    """


def __getattr__(name: str) -> type[Any]:
    wrapped = getattr(gradaccum.torch.optim, name)
    if not (isinstance(wrapped, type) and issubclass(wrapped, gradaccum.torch.optim.Optimizer)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # One class per name, so that pickle finds the same one again.
    globals()[name] = type(name, (_RunAI, wrapped), {"__doc__": wrapped.__doc__, "__module__": __name__})
    return globals()[name]


def __dir__() -> list[str]:
    return dir(gradaccum.torch.optim)
