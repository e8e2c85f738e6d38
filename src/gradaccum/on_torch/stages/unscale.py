"""Take a GradScaler's loss scale out of the summed gradients; an overflow makes no update."""

from __future__ import annotations

import logging

from torch import Tensor

from gradaccum.on_torch.foreach import scale_
from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["Unscale"]

logger = logging.getLogger("gradaccum")


class Unscale:
    """`sum = sum / scale`. Looks at the overflow, and so waits for the device."""

    def __call__(self, total: WindowTotal) -> bool:
        if bool(total.overflow):
            logger.info("No update: a gradient of this window overflowed the loss scale")
            return False
        scale = total.scale
        if isinstance(scale, Tensor):
            scale_(total.gradients, scale.double().reciprocal() if scale.device.type != "mps" else 1 / scale)
        elif scale:
            scale_(total.gradients, 1 / scale)
        total.scale = None
        return True
