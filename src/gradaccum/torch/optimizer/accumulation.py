"""A window of micro-batches and the gradients in it: from the first backward pass to the finished mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.gradients import Arrivals, GradientSum, ScreenedGradientSum, all_finite, clip_norm_, scale_
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.torch.distributed import SingleRank, Total
from gradaccum.torch.loss import WindowLoss
from gradaccum.torch.optimizer.guard import Guard
from gradaccum.torch.optimizer.loss_scale import LossScale
from gradaccum.window import Reduction, Window

__all__ = ["Accumulation", "Nonfinite"]

logger = logging.getLogger("gradaccum")

Nonfinite = Literal["propagate", "skip_window", "skip_micro_batch"]


_MIXED = (
    "Some losses of this window came through backward(loss, weight=...), others through loss.backward(), which cannot "
    "say what it weighs. Use one of the two for all of them. discard() drops the window."
)


class Accumulation:
    """The open window of one optimizer, with its gradients.

    For each micro-batch: `expect` (optional) says what it weighs, gradients arrive through `backward` or by themselves,
    `add` counts it. When the window closes, `finish` leaves the mean gradient in `p.grad`, and `close` empties it.

    Args:
        parameters: Called whenever the parameters are needed, in the order of the optimizer's groups.
        reduction: What the losses are, `"mean"` or `"sum"`.
        clip_grad_norm: Largest 2-norm of the finished gradient, or None.
        accumulate_dtype: What narrower parameters' gradients are summed in, or None.
        nonfinite: What to do about NaN and infinity.
        ranks: What keeps this window together with those of other ranks.
        noise_scale: Whether to measure the noise scale.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        *,
        ranks: SingleRank | None = None,
        reduction: Reduction = "mean",
        clip_grad_norm: float | None = None,
        accumulate_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "propagate",
        noise_scale: bool | None = None,
    ) -> None:
        self.window = Window(reduction=reduction)
        self.ranks = SingleRank() if ranks is None else ranks
        self.unit = 1.0
        """What all ranks' sums are multiples of, when they are reduced."""
        self.noise = NoiseMeter() if noise_scale else None
        self.clip_grad_norm = clip_grad_norm
        self.nonfinite = nonfinite
        self.screened = ScreenedGradientSum(parameters, accumulate_dtype) if nonfinite == "skip_micro_batch" else None
        self.sums = self.screened or GradientSum(parameters, accumulate_dtype)
        self.guard = Guard(parameters())
        self.loss_scale = LossScale(self.sums, self.guard.accept)
        self.arrivals = Arrivals(parameters)
        self.sums.attach(self.ranks.pending)
        self.ranks.attach(self)
        self.begin()
        self.loss = WindowLoss(reduction)
        self.weights: list[float] = []
        self.grad_norm: Tensor | None = None
        self._broken: BaseException | None = None
        self._factor, self._weighed_arrivals, self._arriving = 1.0, 0, 1.0
        self.expect_nothing()

    def begin(self) -> None:
        """An empty window; where a backward pass will reduce it, its unit must be the other ranks', too."""
        self.window.close()
        if self.ranks.several and not self.ranks.by_hand:
            self.window.unit = self.unit

    # One micro-batch.

    def expect_nothing(self) -> None:
        """The micro-batches that come weigh the same, unless `backward` says otherwise."""
        self._default, self._default_given, self._expecting = 1.0, False, False
        self._counted = True
        self._scale_arrivals(1.0)
        self.window.last = False

    def expect(self, weight: float, given: bool, last: bool) -> None:
        """The next micro-batch weighs this much; `given` by the user, or its rows; `last` of its epoch."""
        window = self.window
        self._default, self._default_given, self._expecting, window.last = weight, given, True, last
        self._counted = False
        arriving = 1.0
        if weight == 0:
            if self.ranks.in_step:
                arriving = 0.0  # the other ranks need this one's passes
            else:
                self.sums.put_aside()
                self.guard.restart()
        elif window.reduction == "mean" and weight != window.unit:
            if self.ranks.several and not self.ranks.by_hand:
                assert window.unit is not None
                arriving = weight / window.unit
            else:  # a gradient that comes through loss.backward() joins the sum as it is, so the sum takes its unit
                factor = window.rescale(weight)
                if window.is_open and factor != 1.0:
                    self.sums.scale_(factor)
                    self.guard.accept()
        self._scale_arrivals(arriving)

    def backward(self, loss: Tensor, weight: Any, **how: Any) -> None:
        """Weigh the micro-batch, and run the backward pass with its factor."""
        self.check_broken()
        if loss.numel() != 1:
            raise ValueError(f"`loss` must be a scalar. Received: loss of shape {tuple(loss.shape)}.")
        window = self.window
        if not window.is_open and window.pending is None:
            self.loss.restart()
        if weight is None and window.pending is None and self._default_given:
            weight = self._default
        factor = window.weigh(weight, default=self._default)
        assert window.pending is not None
        if window.pending == 0 and not self.ranks.in_step:
            self.loss_scale.rescale_()  # no backward pass will do it
            return
        if window.pending:
            self.loss.add(window.micro_batches, loss, window.pending, window.pending_given)
        before = self.guard.arrivals
        try:
            if self.ranks.in_step:
                self._scale_arrivals(1.0 if window.pending else 0.0)
            with self.arrivals.muted():
                loss.backward(None if factor == 1.0 else torch.full_like(loss, factor), **how)
        except BaseException as error:
            self._broken = error
            self.ranks.leave()
            raise
        self._factor, self._weighed_arrivals = factor, self._weighed_arrivals + self.guard.arrivals - before

    def _scale_arrivals(self, factor: float) -> None:
        """What comes through `loss.backward()` cannot be multiplied there, so it is on its way to the sum."""
        if factor == self._arriving:
            return
        self._arriving = factor
        if self.ranks.in_step:
            self.ranks.scale(factor)
        else:
            self.arrivals.scale(factor)

    def add(self, scaled: Sequence[Any] = ()) -> bool:
        """Count the micro-batch. Returns whether the window closes with it.

        Args:
            scaled: Under a GradScaler, its live scale (None after `unscale_`) and whether it found an overflow.

        Raises:
            WindowError: The sum was edited or cleared from outside, or a backward pass failed.
        """
        window, guard = self.window, self.guard
        if self._broken is not None:
            self.check_broken()
        if guard.trouble() is not None:
            self.check_sum()
        if self.sums.aside is not None:
            self.sums.take_back()
            guard.accept()
        if window.pending is None:
            self._weigh_plain()
        elif self._factor != 1.0 and guard.arrivals != self._weighed_arrivals:
            raise WindowError(_MIXED)
        self._weighed_arrivals = 0
        if self.screened is not None:
            assert window.pending is not None
            self.weights.append(window.pending)
        if scaled:
            self._unscale(*scaled)
        closes = window.add()
        self._counted = True
        self._scale_arrivals(1.0)
        if self.screened is not None:
            self.screened.add()
            guard.accept()  # its gradient has moved into the sum
        if self.noise is not None and self.noise.waiting and window.weight > 0 and not self.ranks.reduced:
            self._measure(self.noise)
        guard.arrivals = 0  # what arrives from now on belongs to the next micro-batch
        if not closes and self.loss_scale.in_use:
            self.loss_scale.expect_backward()
        return closes

    def _measure(self, noise: NoiseMeter) -> None:
        """Show the meter the sum so far: unscaled and over the weight, it is the mean of the micro-batches so far."""
        noise.unit = "rows" if self.window.weights_given or self._expecting else "micro-batches"
        multiple: float | Tensor = self.window.weight / (self.window.unit or 1.0)
        if self.loss_scale.scale is not None:
            multiple = multiple * self.loss_scale.scale.double()
        held = [g for g in self.sums.held() if g is not None] or self.ranks.pending()
        noise.micro_batch(held, self.window.weight, multiple)

    def skip(self) -> None:
        """The micro-batch that was expected is over, counted or not: if not, it must not have left a gradient."""
        if self.window.micro_batches or not self._counted:
            self.check_untouched()
        if self.sums.aside is not None:
            self.sums.take_back()
            self.guard.accept()

    def _weigh_plain(self) -> None:
        """This micro-batch came through `loss.backward()`, or had no backward pass."""
        window = self.window
        if not self._expecting and window.weights_given and self.guard.arrivals and window.reduction == "mean":
            raise WindowError(_MIXED)
        window.weigh(self._default if self._default_given else None, default=self._default)

    def _unscale(self, scale: Tensor | None, found_inf: Tensor) -> None:
        if scale is not None:
            self.loss.unscale(self.window.micro_batches, scale)
        if self.screened is None:
            if scale is None and not self.window.closes_next:
                raise WindowError(
                    "scaler.unscale_() was called inside an open window: the next gradient would come scaled again. "
                    "Call it when `optimizer.closes_next`, or not at all: the wrapper unscales, and clips with "
                    "clip_grad_norm=. discard() drops the window."
                )
            self.loss_scale.add(scale, found_inf)
            self.guard.accept()
        elif scale is not None:
            scale_(self.sums.gradients(), scale.reciprocal())

    # The window's end.

    def finish(self) -> bool:
        """Turn the sum into the mean gradient, clipped, in `p.grad`. Returns whether there is one to update with."""
        finished = self._finish()
        if finished:
            self.sums.cast()
        else:
            self.sums.clear()
        return finished

    def _finish(self) -> bool:
        self.loss_scale.join_restored()
        if self.screened is not None:
            self._screen(self.screened)
        if self.ranks.several:
            if not self._reduce():
                return False
        elif self.loss_scale.in_use:
            assert self.loss_scale.overflow is not None
            if self.loss_scale.overflow.item():
                logger.info("No update: a gradient of this window overflowed the loss scale")
                return False
            self.loss_scale.unscale_()
        divisor = self._divisor()
        if divisor == 0:
            logger.warning("No update: this window of %d micro-batches weighs nothing", self.window.micro_batches)
            return False
        self.sums.finish(divisor)
        if self.nonfinite == "skip_window" and not self._finite():
            logger.warning("No update: the gradient of this window is not finite")
            return False
        if self.noise is not None:
            window = self.window
            multiple = window.weight / (window.unit or 1.0) / divisor / self.ranks.size
            self.noise.window(self.sums.gradients(), window.weight, multiple)
        if self.clip_grad_norm is not None:
            self.grad_norm = clip_norm_(self.sums.gradients(), self.clip_grad_norm)
        return True

    def _screen(self, sums: ScreenedGradientSum) -> None:
        """Leave out what was not finite, and have the sum of the rest in `p.grad`."""
        counted = sums.counted()
        dropped = {index for index, counts in enumerate(counted) if not counts}
        if dropped:
            logger.warning("Left out %d of %d micro-batches: gradient not finite", len(dropped), len(counted))
        self.loss.dropped = dropped
        self.window.weight = math.fsum(w for w, counts in zip(self.weights, counted, strict=True) if counts)
        sums.present()

    def _reduce(self) -> bool:
        """Make the sum and its weight those of all ranks. Returns False where a gradient has overflowed."""
        window, ranks, scale = self.window, self.ranks, self.loss_scale
        by_hand = not ranks.reduced
        if by_hand:
            if window.reduction == "mean":
                self.sums.scale_(window.rescale(self.unit))
            scale.bring_to(ranks.loss_scale)
        total = ranks.total(Total(window.weight, window.weights_given, window.largest, *scale.told()))
        scale.agree(ranks.loss_scale)
        window.weight, window.weights_given = total.weight, total.given
        self.unit = total.largest or self.unit
        if total.overflow:
            logger.info("No update: a gradient of this window overflowed the loss scale")
            return False
        if total.scale:
            self.sums.scale_(1 / total.scale)
            if by_hand and ranks.in_step and not self._finite():  # the scaler has not seen what FSDP kept to itself
                logger.info("No update: a gradient of this window overflowed the loss scale")
                return False
        return True

    # What `ranks` calls: a `gradaccum.torch.distributed.Listener`.

    def forward_done(self, loss_scale: float) -> None:
        self.loss_scale.adopt(loss_scale)

    def backward_starts(self) -> None:
        self.loss_scale.rescale_()

    def reduced(self) -> None:
        self.guard.accept()

    def _finite(self) -> bool:
        finite = all_finite(self.sums.gradients())
        if self.ranks.in_step:  # each rank has looked at its shard
            return self.ranks.sum((~finite).double()).item() == 0
        return bool(finite.item())

    def _divisor(self) -> float:
        # What the ranks' reduction leaves is a mean over them.
        return self.window.divisor / self.ranks.size if self.window.weight > 0 else 0.0

    def close(self) -> None:
        """The update is made, or given up: the next micro-batch is the first of a new window."""
        self.begin()
        self.sums.close()
        self.loss_scale.close()
        self.guard.restart()
        self.weights = []
        if self.noise is not None:
            self.noise.restart()

    def empty(self, set_to_none: bool = True) -> None:
        """Clear the gradients, too."""
        self.window.forget()
        self.loss_scale.close()
        self.guard.restart()
        self.weights, self._broken, self._weighed_arrivals = [], None, 0
        self.ranks.clear()
        if self.noise is not None:
            self.noise.restart()
        self.sums.clear(set_to_none)

    # Misuse.

    def check_broken(self) -> None:
        """Raise if a backward pass has failed in this window."""
        if self._broken is not None:
            raise WindowError(
                f"A backward pass of this window failed ({type(self._broken).__name__}), and may have left part of its "
                "gradient in the sum. Call discard() to drop the window; parameters and optimizer state are as they "
                "were."
            ) from self._broken

    def check_sum(self) -> None:
        """Raise if somebody else changed the sum; in a window of one micro-batch, the plain loop, that is fine."""
        window, trouble = self.window, self.guard.trouble()
        alone = not window.is_open and window.closes_next
        if trouble is None or (alone and (window.reduction == "mean" or not window.pending_given)):
            return
        advice = {
            "cleared": "cleared or replaced inside an open window, by model.zero_grad() perhaps. Use "
            "optimizer.zero_grad(), which waits for the window's end.",
            "edited": "edited inside an open window, by clipping perhaps. Until step() closes the window p.grad holds "
            "an undivided sum. Pass clip_grad_norm= to the wrapper, or edit the finished gradient in a hook: "
            "register_step_pre_hook.",
        }[trouble]
        raise WindowError(f"The gradients were {advice} discard() drops the window.")

    def check_untouched(self) -> None:
        """Raise if a gradient has arrived since the last micro-batch was counted."""
        if self.guard.arrivals or self.window.pending is not None:
            raise WindowError(
                "A gradient has arrived since the last step(), and belongs to no micro-batch. Call step() after the "
                "backward pass of every micro-batch: it counts them. If another loss reaches these parameters, as a "
                "GAN's generator loss reaches its discriminator, switch requires_grad_(False) on them meanwhile. To "
                "skip a micro-batch, use backward(loss, weight=0). discard() empties the window."
            )
