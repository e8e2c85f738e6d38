"""What scripts read from the original's optimizers."""

from __future__ import annotations

from typing import Any

__all__ = ["Window"]


class Window:
    """`optimizer.runai`: its `steps`, and the `step` that it is at.

    Args:
        optimizer: A wrapped optimizer of gradaccum.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def steps(self) -> int:
        """Micro-batches of this window."""
        return self._optimizer.steps

    @property
    def step(self) -> int:
        """Micro-batches that are in it, from 0 to `steps` - 1."""
        return self._optimizer.micro_batches
