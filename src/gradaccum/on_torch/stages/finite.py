"""Skip the update of a window whose gradient has NaN or infinity in it: `nonfinite="skip_window"`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from gradaccum.on_torch.foreach import all_finite
from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["Finite"]

logger = logging.getLogger("gradaccum")


class Finite:
    """No update unless every entry of the gradient is finite, on all ranks that have a part of it."""

    def __init__(self, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        self._sum = sum_over_ranks

    def __call__(self, total: WindowTotal) -> bool:
        finite = all_finite(total.gradients)
        skips = not finite.item() if self._sum is None else self._sum((~finite).double()).item() > 0
        if skips:
            logger.warning("No update: the gradient of this window is not finite")
        return not skips
