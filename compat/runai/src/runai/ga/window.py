"""What scripts read from the original's optimizers."""

from __future__ import annotations

import types
from typing import Any

from gradaccum import WindowError

__all__ = ["Window"]


class Window:
    """`optimizer.runai`: its `steps`, and the `step` that it is at. The inner optimizer has it too, as in the original.

    Args:
        optimizer: A wrapped optimizer of gradaccum, or a weak proxy of one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        # Files hold the numbers. A wrapped optimizer that is loaded gives its inner one a new window.
        try:
            numbers = {"steps": self.steps, "step": self.step}
        except ReferenceError:  # the wrapped optimizer is gone
            numbers = {}
        return types.SimpleNamespace, (), numbers

    @property
    def steps(self) -> int:
        """Micro-batches of this window. Setting it holds from the next window on."""
        return self._optimizer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._optimizer.steps = steps

    @property
    def step(self) -> int:
        """Micro-batches that are in it, from 0 to `steps` - 1. It can be set to what it is.

        Raises:
            WindowError: It is set to another number.
        """
        return self._optimizer.micro_batches

    @step.setter
    def step(self, step: int) -> None:
        if step != self.step:
            raise WindowError(
                f"`runai.step` counts the micro-batches whose gradients are in the open window, {self.step}. Received: "
                f"step={step}. Close the window with optimizer.flush(), or load the optimizer's state with its window."
            )
