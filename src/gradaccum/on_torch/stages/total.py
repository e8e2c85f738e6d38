"""The record that stages hand on: a window's summed gradients, its weight, and what they are to be divided by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from gradaccum.on_torch.grad_buffer import GradientBuffer

__all__ = ["Stage", "WindowTotal", "run_stages"]


@dataclasses.dataclass(slots=True)
class WindowTotal:
    """What a window's micro-batches have added up to, on its way to the finished gradient."""

    buffer: GradientBuffer
    divisor: float | Tensor | None
    """What the sum is still to be divided by; None: nothing."""
    weight: float | None = None
    """What the window weighs: 0 makes no update. None: not known, or not asked."""
    micro_batches: int = 1
    scale: float | Tensor | None = None
    """The GradScaler's scale that the sum is still multiplied by."""
    overflow: bool | Tensor = False
    """Whether a gradient has overflowed that scale."""
    rows: float = 0.0
    """What the noise scale counts: rows, or weight."""
    multiple: float | Tensor = 1.0
    """Ratio of the finished gradient to the mean over those."""
    outside: Sequence[Tensor] = ()
    """Gradients of parameters that no optimizer here has: they are divided, too."""
    grad_norm: Tensor | None = None
    """The finished gradient's 2-norm before clipping."""

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are there, as they are now."""
        return self.buffer.gradients()


Stage = Callable[[WindowTotal], bool]
"""Works on the gradients of a window that closes, in place. Returns whether there is one to update with."""


def run_stages(stages: Iterable[Stage], total: WindowTotal) -> bool:
    """Run the stages in their order. Returns whether the inner optimizer is to step."""
    return all(stage(total) for stage in stages)
