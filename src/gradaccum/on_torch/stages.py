"""What happens to a window's summed gradients before the inner optimizer's step: a list of stages, built once.

    for stage in stages:
        if not stage(total):
            return False            # no update

No stage knows another. A new one is a module such as `clip_value`, and a line in `gradient_stages`, which states the
order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.clip_value import ClipValue
from gradaccum.on_torch.foreach import all_finite, clip_norm_, divide_, scale_
from gradaccum.on_torch.grad_buffer import WindowTotal

logger = logging.getLogger("gradaccum")


Stage = Callable[[WindowTotal], bool]
"""Works on the gradients of a window that closes, in place. Returns whether there is one to update with."""


def run_stages(stages: Iterable[Stage], total: WindowTotal) -> bool:
    """Run the stages in their order. Returns whether the inner optimizer is to step."""
    return all(stage(total) for stage in stages)


def gradient_stages(
    options: Mapping[str, Any],
    *first: Stage | None,
    unscale: Unscale | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    noise: Any = None,
) -> list[Stage]:
    """The stages that `options`, the public constructors' by name, ask for: a plain loop's are `[Divide]`."""
    asked = {name: value for name, value in options.items() if value is not None}
    clips = [
        ClipNorm(asked["clip_grad_norm"]) if "clip_grad_norm" in asked else None,
        ClipValue(asked["clip_grad_value"]) if "clip_grad_value" in asked else None,
    ]
    if unscale is not None and unscale.by_scaler is not None and not any(clips):
        unscale = None  # the scaler steps the optimizers, and unscales then
    stages = [
        *first,
        Divide(),
        unscale,
        Finite(sum_over_ranks) if asked.get("nonfinite") == "skip_window" else None,
        MeasureNoise(noise) if noise is not None else None,
        *clips,
        Cast() if "accumulate_dtype" in asked else None,
    ]
    return [stage for stage in stages if stage is not None]


@dataclasses.dataclass(frozen=True)
class Unscale:
    """Take a GradScaler's loss scale out of the gradient; an overflow makes no update. Waits for the device.

    Where the scaler is to step the optimizers, it does so itself, `by_scaler`: its own steps are left out then.
    """

    by_scaler: Callable[[], None] | None = None

    def __call__(self, total: WindowTotal) -> bool:
        if self.by_scaler is not None:
            self.by_scaler()
            total.scale = None
            return True
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


class Divide:
    """`gradient = sum / divisor`: the large batch's mean gradient. A window of weight 0 makes no update."""

    def __call__(self, total: WindowTotal) -> bool:
        if total.weight == 0:
            logger.warning("No update: the total weight of this window's %d micro-batches is 0", total.micro_batches)
            return False
        divisor = total.divisor
        if divisor is None or (type(divisor) is float and divisor == 1):
            return True
        gradients = total.buffer.gradients()
        if total.outside:
            gradients = [*gradients, *total.outside]
        if type(divisor) is not float and isinstance(divisor, Tensor):  # of weights on a device: nobody waits for it
            scale_(gradients, torch.where(divisor > 0, 1.0 / divisor, 0.0))
        else:
            divide_(gradients, divisor)
        return True


@dataclasses.dataclass(frozen=True)
class Finite:
    """No update unless every entry of the gradient is finite, on all ranks that have a part of it."""

    sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def __call__(self, total: WindowTotal) -> bool:
        finite, sum_ = all_finite(total.gradients), self.sum_over_ranks
        skips = not finite.item() if sum_ is None else sum_((~finite).double()).item() > 0
        if skips:
            logger.warning("No update: the gradient of this window is not finite")
        return not skips


@dataclasses.dataclass(frozen=True)
class MeasureNoise:
    """Shows a meter the window's gradient, before clipping."""

    meter: Any  # a NoiseMeter

    def __call__(self, total: WindowTotal) -> bool:
        scale = 1.0 if total.scale is None else total.scale
        self.meter.window(total.gradients, total.rows, total.multiple * scale)
        return True


@dataclasses.dataclass(frozen=True)
class ClipNorm:
    """As `torch.nn.utils.clip_grad_norm_`, once per window."""

    limit: float

    def __call__(self, total: WindowTotal) -> bool:
        total.grad_norm = clip_norm_(total.gradients, self.limit)
        return True


class Cast:
    """Gives the finished gradients their parameters' own dtype, which is all that optimizers accept."""

    def __call__(self, total: WindowTotal) -> bool:
        total.buffer.cast()
        return True
