"""Divide the summed gradients by the window's weight: from here on they are the large batch's mean gradient."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from gradaccum.on_torch.foreach import divide_, scale_
from gradaccum.on_torch.stages.total import WindowTotal

__all__ = ["Divide"]

logger = logging.getLogger("gradaccum")


class Divide:
    """`gradient = sum / divisor`; a window of weight 0 makes no update."""

    def __call__(self, total: WindowTotal) -> bool:
        if total.weight == 0:
            logger.warning("No update: this window of %d micro-batches weighs nothing", total.micro_batches)
            return False
        divisor = total.divisor
        if divisor is None:
            return True
        gradients = [*total.gradients, *total.outside]
        if type(divisor) is not float and isinstance(divisor, Tensor):  # of weights on a device: nobody waits for it
            scale_(gradients, torch.where(divisor > 0, 1.0 / divisor, 0.0))
        elif divisor != 1:
            divide_(gradients, divisor)
        return True
