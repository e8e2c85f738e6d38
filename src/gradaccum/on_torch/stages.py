"""What happens to a window's summed gradients before the inner optimizer's step: a list of stages, built once.

    for stage in stages:
        if not stage(total):
            return False            # no update

No stage knows another. A new one is a class here, and a line in `gradient_stages`, which states the order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradaccum.on_torch.foreach import all_finite, clip_norm_, clip_value_, divide_, scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.noise import NoiseMeter

logger = logging.getLogger("gradaccum")


@dataclasses.dataclass(slots=True)
class WindowTotal:
    """What a window's micro-batches have added up to, on its way to the finished gradient."""

    buffer: GradientBuffer
    divisor: float | Tensor | None  # what the sum is still to be divided by; None: nothing
    weight: float | None = None  # what the window weighs: 0 makes no update. None: not known, or not asked
    micro_batches: int = 1
    scale: float | Tensor | None = None  # the GradScaler's, which the sum is still multiplied by
    overflow: bool | Tensor = False  # a gradient has overflowed that scale
    rows: float = 0.0  # what the noise scale counts: rows, or weight
    multiple: float | Tensor = 1.0  # ratio of the finished gradient to the mean over those
    outside: Sequence[Tensor] = ()  # gradients of parameters that no optimizer here has: they are divided, too
    grad_norm: Tensor | None = None  # the finished gradient's 2-norm before clipping

    @property
    def gradients(self) -> list[Tensor]:
        return self.buffer.gradients()


Stage = Callable[[WindowTotal], bool]
"""Works on the gradients of a window that closes, in place. Returns whether there is one to update with."""


def run_stages(stages: Iterable[Stage], total: WindowTotal) -> bool:
    """Run the stages in their order. Returns whether the inner optimizer is to step."""
    return all(stage(total) for stage in stages)


def gradient_stages(
    *first: Stage | None,
    before_clipping: Iterable[Stage] = (),
    skip_nonfinite: bool = False,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    noise: NoiseMeter | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    accumulates_wide: bool = False,
) -> list[Stage]:
    """The stages that were asked for: a plain loop's are `[Divide]`."""
    stages = [
        *first,
        Divide(),
        Finite(sum_over_ranks) if skip_nonfinite else None,
        MeasureNoise(noise) if noise is not None else None,
        *before_clipping,
        ClipNorm(clip_grad_norm) if clip_grad_norm is not None else None,
        ClipValue(clip_grad_value) if clip_grad_value is not None else None,
        Cast() if accumulates_wide else None,
    ]
    return [stage for stage in stages if stage is not None]


class Unscale:
    """Take a GradScaler's loss scale out of the sum; an overflow makes no update. Waits for the device."""

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

    meter: NoiseMeter

    def __call__(self, total: WindowTotal) -> bool:
        self.meter.window(total.gradients, total.rows, total.multiple)
        return True


@dataclasses.dataclass(frozen=True)
class ClipNorm:
    """As `torch.nn.utils.clip_grad_norm_`, once per window."""

    limit: float

    def __call__(self, total: WindowTotal) -> bool:
        total.grad_norm = clip_norm_(total.gradients, self.limit)
        return True


@dataclasses.dataclass(frozen=True)
class ClipValue:
    """As `torch.nn.utils.clip_grad_value_`, once per window."""

    limit: float

    def __call__(self, total: WindowTotal) -> bool:
        clip_value_(total.gradients, self.limit)
        return True


class Cast:
    """Gives the finished gradients their parameters' own dtype, which is all that optimizers accept."""

    def __call__(self, total: WindowTotal) -> bool:
        total.buffer.cast()
        return True
