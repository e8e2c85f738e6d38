"""A window of micro-batches and the gradients in it: from the first backward pass to the finished mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.core.window import Reduction, Window, mixed_error
from gradaccum.on_torch.foreach import all_finite, scale_
from gradaccum.on_torch.grad_buffer import Arrivals, GradientBuffer, ScreenedBuffer
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.stages import Stage, Unscale, WindowTotal, gradient_stages, run_stages
from gradaccum.torch.distributed import Listener, SingleRank, Total
from gradaccum.torch.guard import Guard, failed_error, tampering_error, untouched_error
from gradaccum.torch.loss import (
    NamedLoss,
    TermSums,
    WindowLoss,
    checked_scalar,
    checked_terms,
    mixed_terms_error,
    not_by_name_error,
    unscaled_terms_error,
)
from gradaccum.torch.optimizer.loss_scale import LossScale, unscaled_error

__all__ = ["Accumulation", "Nonfinite"]

logger = logging.getLogger("gradaccum")

Nonfinite = Literal["propagate", "skip_window", "skip_micro_batch"]


class Accumulation(Listener):
    """The open window of one optimizer, with its gradients.

    For each micro-batch: `expect` (optional) says what it weighs, gradients arrive through `backward` or by themselves,
    `add` counts it. When the window closes, `finish` leaves the mean gradient in `p.grad`, and `close` empties it.

    Args:
        parameters: Called whenever the parameters are needed, in the order of the optimizer's groups.
        reduction: What the losses are, `"mean"` or `"sum"`.
        clip_grad_norm: Largest 2-norm of the finished gradient, or None.
        clip_grad_value: Largest absolute value of its entries, or None.
        accumulate_dtype: What narrower parameters' gradients are summed in, or None.
        nonfinite: What to do about NaN and infinity.
        ranks: What keeps this window together with those of other ranks.
        noise: Measures the noise scale, or None.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        *,
        ranks: SingleRank | None = None,
        reduction: Reduction = "mean",
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        accumulate_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "propagate",
        noise: NoiseMeter | None = None,
    ) -> None:
        self.window = Window(reduction=reduction)
        self.ranks = SingleRank() if ranks is None else ranks
        self.noise = noise
        self.clip_grad_norm, self.clip_grad_value, self.nonfinite = clip_grad_norm, clip_grad_value, nonfinite
        self.screened = ScreenedBuffer(parameters, accumulate_dtype) if nonfinite == "skip_micro_batch" else None
        self.by_name = None if self.screened is not None else TermSums(parameters, accumulate_dtype)
        self.sums: GradientBuffer = self.screened or self.by_name  # type: ignore[assignment]  # one of the two is there
        self.guard = Guard(parameters, whole=not self.ranks.sharded, pending=self.ranks.pending)
        self.loss_scale = LossScale(self.sums, self.guard)
        self.arrivals = Arrivals(parameters)
        self.sums.attach(self.ranks.pending)
        self.ranks.attach(self)
        self.begin()
        self.loss = WindowLoss(reduction)
        self.grad_norm: Tensor | None = None
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """An empty window; where a backward pass will reduce it, its unit must be the other ranks', too."""
        self.window.close()
        if self.ranks.is_distributed and not self.ranks.manual_reduce:
            self.window.unit = self.ranks.unit

    def parameters_added(self) -> None:
        """Parameters have joined a group: they are summed and watched like the others."""
        self.sums.prepare()
        self.loss_scale.remove()
        self.guard.watch_all()

    def remove(self) -> None:
        """Leave the parameters as they were found: no hooks, their own `grad_dtype`."""
        self.guard.remove()
        self.loss_scale.remove()
        self.arrivals.scale(1.0)
        self.sums.release()

    # One micro-batch.

    def expect_nothing(self) -> None:
        """The micro-batches that come weigh the same, unless `backward` says otherwise."""
        self.window.expect_nothing()
        self._scale_arrivals(1.0)

    def expect(self, weight: float, given: bool, last: bool) -> None:
        """The next micro-batch weighs this much; `given` by the user, or its rows; `last` of its epoch."""
        window = self.window
        window.expect(weight, given, last)
        arriving = 1.0
        if weight == 0:
            if self.ranks.sharded:
                arriving = 0.0  # the other ranks need this one's passes
            else:
                self.check_sum()
                self.sums.detach()
                self.guard.restart()
        elif window.reduction == "mean" and weight != window.unit and not (self.by_name and self.by_name.terms):
            if self.ranks.is_distributed and not self.ranks.manual_reduce and window.unit is not None:
                arriving = weight / window.unit
            else:  # a gradient that comes through loss.backward() joins the sum as it is, so the sum takes its unit
                factor = window.rescale(weight)
                if window.is_open and factor != 1.0:
                    with self.guard.accepting():
                        self.sums.scale_(factor)
        self._scale_arrivals(arriving)

    def backward(self, loss: Any, weight: Any, **how: Any) -> None:
        """Weigh the micro-batch, and run the backward pass with its factor."""
        self.check_failed()
        if isinstance(loss, (Mapping, list)):
            self._backward_terms(checked_terms(loss, weight), **how)
            return
        window, one = self.window, self.window.micro_batch
        loss = checked_scalar(loss, "`loss`")
        if self.by_name is not None and self.by_name.terms:
            raise mixed_terms_error()
        if one.weight is None:
            if not window.is_open:
                self.loss.restart()
            if weight is None and one.default_given:
                weight = one.default
        if weight is not None and self.ranks.sharded and self.ranks.unit is None:
            window.unit = None  # the ranks agree on one in this pass, by what it weighs
        factor = window.weigh(weight)
        if one.weight == 0 and not self.ranks.sharded:
            self.loss_scale.rescale_()  # no backward pass will do it
            with self.guard.accepting():
                self.sums.reach(loss)
            return
        if one.weight:
            self.loss.add(window.micro_batches, loss, one.weight, one.given)
        self.run_backward(loss, factor, **how)

    def _backward_terms(self, terms: list[NamedLoss], **how: Any) -> None:
        """The backward passes of several losses, each to a sum of its own."""
        window, one, sums = self.window, self.window.micro_batch, self.by_name
        if sums is None or self.noise is not None or self.ranks.is_distributed or one.default_given:
            raise not_by_name_error()
        if not sums.terms and (window.weight > 0 or one.weight is not None or self.guard.arrivals):
            raise mixed_terms_error()
        if one.weight is None and not window.is_open:
            self.loss.restart()
        counts = any(weight for _, _, weight in terms)
        if one.weight is None or (counts and one.weight == 0):
            one.weight = None
            window.weigh(float(counts))
        if not counts:
            self.loss_scale.rescale_()  # no backward pass will do it
        for name, loss, weight in terms:
            if weight:
                self.loss.add(window.micro_batches, loss, weight, True, name)
        sums.backward(terms, window.reduction, self.guard.accepting, self.run_backward, **how)

    def run_backward(self, loss: Tensor, factor: float, **how: Any) -> None:
        """The backward pass of a loss, with the factor of its gradient."""
        before, one = self.guard.arrivals, self.window.micro_batch
        try:
            if self.ranks.sharded:
                self.ranks.scale(1.0 if one.weight else 0.0)
            with self.arrivals.muted():
                loss.backward(None if factor == 1.0 else torch.full_like(loss, factor), **how)
        except BaseException as error:
            self._failure = error
            self.ranks.abort()
            raise
        one.weighed += self.guard.arrivals - before

    def _scale_arrivals(self, factor: float) -> None:
        """What comes through `loss.backward()` cannot be multiplied there, so it is on its way to the sum."""
        (self.ranks if self.ranks.sharded else self.arrivals).scale(factor)

    def add(self, scaled: Sequence[Any] = (), untouched: bool = False) -> bool:
        """Count the micro-batch. Returns whether the window closes with it.

        Args:
            scaled: Under a GradScaler, its live scale (None after `unscale_`) and whether it found an overflow.
            untouched: Whether the guard has seen just now that autograd alone has written the sum.

        Raises:
            WindowError: The sum was edited or cleared from outside, or a backward pass failed.
        """
        window, guard, one = self.window, self.guard, self.window.micro_batch
        if scaled and scaled[0] is None:
            guard.forget_values()  # `unscale_` has changed them, and raises no version
        if self._failure is not None or (not untouched and (guard.failed or guard.tampering() is not None)):
            self.check_failed()
            self.check_sum()
        in_reach = self.sums.detached is None
        if not in_reach:
            self.sums.reattach()
            guard.accept()
        if self.by_name is not None and self.by_name.terms:
            if guard.arrivals != one.weighed:
                raise mixed_terms_error()
            self.by_name.micro_batch_over()
        elif one.weight is None and not one.in_batches and window.weights_given and window.reduction == "mean":
            if guard.arrivals:
                raise mixed_error()
        elif one.weight is not None and one.factor != 1.0 and guard.arrivals != one.weighed:
            raise mixed_error()
        if one.weight is None:  # it came through loss.backward(), or had no backward pass
            window.weigh(one.default if one.default_given else None)
        # One that weighs nothing has no say, unless `unscale_` has divided the others' sum in it.
        has_say = one.weight or (scaled and scaled[0] is None and in_reach)
        if has_say and self.screened is None and (scaled or guard.arrivals or not guard.idle):
            self.loss_scale.check(bool(scaled))
        if scaled:
            self._unscale(*scaled, in_reach=in_reach)
        elif self.sums.restored is not None:
            self.sums.join_restored()
            guard.accept()
        closes = window.add()
        if self.ranks.sharded or self.arrivals.factor != 1.0:
            self._scale_arrivals(1.0)
        if self.screened is not None:
            self.screened.add()
            guard.accept()  # its gradient has moved into the sum
        if one.weight and not self.ranks.sharded:
            guard.counted(window.closes_next)
        else:
            guard.arrivals = 0  # what arrives from now on belongs to the next micro-batch
            guard.keep()
        if self.noise is not None and self.noise.waiting and window.weight > 0 and not self.ranks.reduced:
            self._measure(self.noise)
        if not closes and self.loss_scale.in_use:
            self.loss_scale.expect_backward()
        return closes

    def _measure(self, noise: NoiseMeter) -> None:
        """Show the meter the sum so far: unscaled and over the weight, it is the mean of the micro-batches so far."""
        told, rows, weight = self.window.weights_given, self.window.micro_batch.in_batches, self.window.weight
        noise.unit, noise.counts_rows = "rows" if told or rows else "micro-batches", rows and not told
        scale = 1.0 if self.loss_scale.scale is None else self.loss_scale.scale.double()
        held = [g for g in self.sums.get() if g is not None] or self.ranks.pending()
        noise.micro_batch(held, weight, weight / (self.window.unit or 1.0) * scale)

    def skip(self) -> None:
        """The micro-batch that was expected is over, counted or not: if not, it must not have left a gradient."""
        if self.window.is_open or self.window.micro_batch.announced:
            self.check_untouched()
        if self.sums.detached is not None:
            self.sums.reattach()
            self.guard.accept()

    def _unscale(self, scale: Tensor | None, found_inf: Tensor, *, in_reach: bool) -> None:
        if scale is not None:
            self.loss.unscale(self.window.micro_batches, scale)
        if self.screened is None:
            if scale is None and self.by_name is not None and len(self.by_name.terms) > 1:
                raise unscaled_terms_error()
            if scale is None and not self.window.closes_next:
                raise unscaled_error()
            if self.window.micro_batch.weight or self.loss_scale.in_use or self.ranks.is_distributed:
                self.loss_scale.add(scale, found_inf, in_reach)
                self.guard.accept()
        elif scale is not None:
            scale_(self.sums.gradients(), scale.reciprocal())

    # The window's end.

    def finish(self) -> bool:
        """Turn the sum into the mean gradient, clipped, in `p.grad`. Returns whether there is one to update with."""
        if self.sums.restored is not None or (self.by_name is not None and self.by_name.terms):
            self.sums.join_restored(self.loss_scale.scale)
        window, scale = self.window, self.loss_scale
        total = WindowTotal(self.sums, window.divisor, window.weight, window.micro_batches, scale.scale)
        self._weigh(total)
        total.overflow = False if scale.overflow is None else scale.overflow
        if not run_stages(self.stages(), total):
            self.sums.clear()
            return False
        self.grad_norm = self.grad_norm if total.grad_norm is None else total.grad_norm
        return True

    def stages(self) -> list[Stage]:
        """What happens to the gradients at the window's end."""
        named = self.by_name is not None and self.by_name.terms
        return gradient_stages(
            self._screen if self.screened is not None else None,
            self._fold if named else None,
            self._reduce if self.ranks.is_distributed else None,
            Unscale() if self.loss_scale.in_use or self.ranks.is_distributed else None,
            skip_nonfinite=self.nonfinite == "skip_window",
            sum_over_ranks=self.ranks.sum if self.ranks.sharded else None,
            noise=self.noise,
            clip_grad_norm=self.clip_grad_norm,
            clip_grad_value=self.clip_grad_value,
            accumulates_wide=self.sums.dtype is not None,
        )

    def _screen(self, total: WindowTotal) -> bool:
        """A stage: leave out micro-batches that were not finite, and have the sum of the rest in `p.grad`."""
        assert self.screened is not None
        counted = self.screened.present()
        self.loss.dropped = {index for index, counts in enumerate(counted) if not counts}
        if self.loss.dropped:
            logger.warning("Left out %d of %d micro-batches: gradient not finite", counted.count(False), len(counted))
        self.window.weight = math.fsum(w for w, counts in zip(self.window.weights, counted, strict=True) if counts)
        self._weigh(total)
        return True

    def _weigh(self, total: WindowTotal) -> None:
        """What the window weighs has become known."""
        window, size = self.window, self.ranks.size
        # The ranks' reduction leaves a mean over them.
        total.weight, total.divisor = window.weight, window.divisor / size
        weight = window.weight / (window.unit or 1)
        total.rows, total.multiple = window.weight, weight / total.divisor / size if total.divisor else 1.0

    def _fold(self, total: WindowTotal) -> bool:
        """A stage: put the sums of losses by name together."""
        assert self.by_name is not None
        self.by_name.fold()
        total.divisor = None
        return True

    def _reduce(self, total: WindowTotal) -> bool:
        """A stage: make the sum and its weight those of all ranks."""
        window, ranks, scale = self.window, self.ranks, self.loss_scale
        manual_reduce = not ranks.reduced
        if manual_reduce:
            scale.bring_to(ranks.loss_scale)
        weights = window.weight, window.weights_given, window.largest
        mine = Total(*weights, *scale.agreement(), window.equal, idle=not window.micro_batches)
        everybody = ranks.total(mine, self._rescale)
        scale.agree(ranks.loss_scale)
        window.weight, window.weights_given = everybody.weight, everybody.given
        total.scale, total.overflow = everybody.scale or None, everybody.overflow
        if everybody.scale and manual_reduce and ranks.sharded and not everybody.overflow:
            # The scaler has not seen what FSDP kept; each rank has looked at its shard.
            finite = all_finite(self.sums.gradients())
            total.overflow = ranks.sum((~finite).double()).item() > 0
        self._weigh(total)
        return True

    def _rescale(self, unit: float) -> None:
        if self.window.reduction == "mean":
            factor = self.window.rescale(unit)
            if factor != 1.0:
                self.sums.scale_(factor)

    # What `ranks` calls: a `gradaccum.torch.distributed.Listener`.

    def share(self) -> Total | None:
        """What the window weighs with the micro-batch in progress; a GradScaler's verdict comes after its pass."""
        window, one = self.window, self.window.micro_batch
        if self.loss_scale.known:
            return None
        weight = one.default if one.weight is None else one.weight
        given = window.weights_given or one.given or (one.weight is None and one.default_given)
        total = window.weight + weight
        equal = not (given or one.in_batches) and total > 0 and window.reduction == "mean"
        return Total(total, given, max(window.largest, weight), equal=equal)

    def own_unit(self) -> float:
        window, one = self.window, self.window.micro_batch
        weight = one.default if one.weight is None else one.weight
        return (window.unit or weight) if weight and window.reduction == "mean" else float(weight > 0)

    def take_unit(self, unit: float) -> float:
        factor = (self.own_unit() or unit) / unit
        self.window.rescale(unit)
        return factor

    def forward_done(self, loss_scale: float) -> None:
        self.loss_scale.adopt(loss_scale)

    def backward_starts(self) -> None:
        self.guard.keep_after_pass()
        self.loss_scale.rescale_()

    def reduced(self) -> None:
        self.guard.accept()

    def close(self) -> None:
        """The update is made, or given up: the next micro-batch is the first of a new window."""
        self.begin()
        self.sums.close()
        self.guard.close()
        self._restart()

    def empty(self, set_to_none: bool = True) -> None:
        """Clear the gradients, too."""
        self.window.micro_batch.restart()
        self.guard.restart()
        self._failure = None
        self.ranks.clear()
        self.sums.clear(set_to_none)
        self._restart()

    def _restart(self) -> None:
        self.loss_scale.close()
        if self.noise is not None:
            self.noise.restart()

    # Misuse.

    def check_failed(self) -> None:
        """Raise if a backward pass has failed in this window."""
        if self._failure is not None or self.guard.failed:
            raise failed_error(self._failure) from self._failure

    def check_sum(self) -> None:
        """Raise if somebody else changed the sum; in a window of one micro-batch, the plain loop, that is fine."""
        window, tampering = self.window, self.guard.tampering()
        alone = not window.is_open and window.closes_next
        if tampering and not (alone and not (window.reduction == "sum" and window.micro_batch.given)):
            raise tampering_error(tampering)

    def check_untouched(self) -> None:
        """Raise if a gradient has arrived since the last micro-batch was counted."""
        self.check_failed()
        if self.guard.arrivals or self.window.micro_batch.weight is not None:
            raise untouched_error()
