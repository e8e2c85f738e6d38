"""Give finished gradients their parameters' own dtype, which is all that optimizers accept."""

from __future__ import annotations

from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["Cast"]


class Cast:
    """Casts what was summed in a wider dtype."""

    def __call__(self, total: WindowTotal) -> bool:
        total.buffer.cast()
        return True
