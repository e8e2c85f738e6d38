"""The open window of gradient accumulation: count micro-batches, add weights, and finish the gradient at its end.

An ordinary micro-batch adds its weight, and nothing else. At the window's end one comparison shows whether autograd
alone has written the sum, and

    for stage in stages:
        if not stage(total):
            return False

leaves the mean gradient in `p.grad`. What else there may be (a GradScaler, several ranks, the sum of a checkpoint, a
noise scale) makes a window `special`: then each micro-batch is looked at. On several ranks it is a `RanksWindow`.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gradaccum.core.window import Window, mixed_error
from gradaccum.errors import WindowError
from gradaccum.on_torch.arguments import checked_choice, checked_scalar
from gradaccum.on_torch.grad_buffer import ArrivalScale, GradientBuffer, WindowTotal, add_gradient
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.private import run_backward
from gradaccum.on_torch.stages import Stage, Unscale, gradient_stages
from gradaccum.torch.watch import GradientMonitor, failed_error, modification_error, untouched_error
from gradaccum.torch.window.loss_scale import LossScale
from gradaccum.torch.window.losses import Losses

logger = logging.getLogger("gradaccum")

_WINDOWS: weakref.WeakSet[GradientWindow] = weakref.WeakSet()

Nonfinite = Literal["propagate", "skip_window"]


class GradientWindow:
    """The open window of one optimizer, with its gradients.

    For each micro-batch: `expect` (optional) says what it weighs, gradients arrive through `backward` or by themselves,
    `count` counts it. When the window closes, `finish` leaves the mean gradient in `p.grad`, and `close` empties it.
    """

    ranks = 1
    """Over how many ranks the sum becomes a mean when it is reduced."""

    def __init__(
        self, parameters: Callable[[], list[Tensor]], noise: NoiseMeter | None, options: Mapping[str, Any]
    ) -> None:
        self.noise, self._options = noise, options
        reduction = options["reduction"]
        self.window, self.losses = Window(reduction=reduction), Losses(reduction)
        self.buffer = GradientBuffer(parameters, options["accumulate_dtype"])
        self.monitor = self._monitor_of(parameters)
        self.passes = self.monitor.passes
        self.loss_scale = LossScale(self.buffer, self.monitor)
        self.arrival_scale = ArrivalScale(parameters)
        self.grad_norm: Tensor | None = None
        self._failure: BaseException | None = None
        self.saved = False  # a checkpoint holds all of it: it may go on elsewhere
        self.set_to_none = True  # what the user's loop passes to `zero_grad`
        self._warned_of_others = self._warned_of_left_out = self._warned_of_division = False
        self._one: Tensor | None = None  # what a backward pass starts from
        self._always_special = noise is not None
        self.begin()
        self.build_stages()
        _WINDOWS.add(self)

    def _monitor_of(self, parameters: Callable[[], list[Tensor]]) -> GradientMonitor:
        return GradientMonitor(parameters)

    def build_stages(self) -> None:
        unscale = Unscale() if self.loss_scale.known else None
        self.stages: list[Stage] = gradient_stages(self._options, unscale=unscale, noise=self.noise)

    def be_special(self) -> None:
        """There is more in this window than gradients that autograd adds up: each micro-batch is looked at."""
        self.special, self.passes.ordinary = True, False

    def begin(self) -> None:
        """Begin an empty window."""
        self.window.close()
        self.special, self.passes.ordinary = self._always_special, False

    def parameters_added(self) -> None:
        self.buffer.prepare()
        self.loss_scale.parameters_added()
        arriving = self.arrival_scale.factor
        self.arrival_scale.set(1.0)
        self.arrival_scale.set(arriving)  # of them, too
        self.monitor.modification()
        self.monitor.watch_all()

    def remove(self) -> None:
        self.monitor.remove()
        self.loss_scale.remove()
        self.arrival_scale.set(1.0)
        self.buffer.release()

    # A micro-batch, until it is counted.

    def expect_nothing(self) -> None:
        self.window.expect_nothing()
        self._scale_arrivals(1.0)

    def expect(self, weight: float, given: bool, last: bool) -> None:
        """The next micro-batch weighs this much; `given` by the user, or its rows; `last` of its epoch."""
        window = self.window
        window.expect(weight, given, last)
        arriving = float(weight > 0)
        if weight == 0:
            self.be_special()
        elif window.reduction == "mean" and weight != window.unit:
            arriving = self._take_unit_of(weight)
        if arriving != 1.0:
            self.passes.ordinary = False
        self._scale_arrivals(arriving)

    def _take_unit_of(self, weight: float) -> float:
        """Keep the sum in multiples of this weight, so that the next gradient joins as it is: its factor, 1."""
        factor = self.window.rescale(weight)
        if self.window.micro_batches and factor != 1.0:
            with self.monitor.resyncing():
                self.buffer.scale_(factor)
        return 1.0

    def _scale_arrivals(self, factor: float) -> None:
        """What comes through `loss.backward()` cannot be multiplied there, so it is on its way to the sum."""
        if factor != self.arrival_scale.factor:
            self.arrival_scale.set(factor)

    def backward(self, loss: Any, weight: Any, retain_graph: bool | None, create_graph: bool) -> None:
        if self._failure is not None or self.passes.unfinished:
            self.check_failed()
        window, one = self.window, self.window.micro_batch
        if type(loss) is not Tensor or loss.ndim:
            loss = _checked_loss(loss)
        if one.weight is None and not window.micro_batches:
            self.losses.restart()
        factor = window.weigh(weight)
        if self.monitor.looking and window.steps > 1 and not self._warned_of_division:
            self._check_division(loss)
        if one.weight:
            self.losses.add(window.micro_batches, loss, one.weight, one.given)
            self._run_backward(loss, factor, retain_graph, create_graph)
        else:
            self._leave_out(loss, retain_graph, create_graph)

    def _check_division(self, loss: Tensor) -> None:
        """Warn, once, of a loss that the loop still divides by the number of micro-batches."""
        node, steps = loss.grad_fn, self.window.steps
        if node is not None and node.name() == "MulBackward0" and self.loss_scale.known:  # by a GradScaler
            node = next((after for after, _ in node.next_functions if after is not None), None)
        divisor = getattr(node, "_saved_other", None) if node is not None and node.name() == "DivBackward0" else None
        if isinstance(divisor, Tensor) and divisor.is_cpu and divisor.numel() == 1 and divisor == steps:
            self._warned_of_division = True
            logger.warning(
                "The loss was divided by %d just before backward(), and the window of %d micro-batches divides by its "
                "weight as well: the update is %d times too small. Pass the loss as it is.",
                *(steps,) * 3,
            )

    def _leave_out(self, loss: Tensor, retain_graph: bool | None, create_graph: bool) -> None:
        """This loss weighs nothing: there is no backward pass."""
        self.loss_scale.rescale_()
        if self.monitor.looking and not self._warned_of_left_out and loss.isfinite() and loss != 0:
            self._warned_of_left_out = True
            logger.warning(
                "weight=0 left out a micro-batch whose loss is %.3g, where a mean over nothing is 0 or NaN. If it "
                "divides by max(1, n), pass weight=max(1, n) as well.",
                loss,
            )

    def _run_backward(self, loss: Tensor, factor: float, retain_graph: bool | None, create_graph: bool) -> None:
        one, scaling = self.window.micro_batch, self.arrival_scale
        before, shared = self.passes.arrivals, None
        if factor != 1.0 and self.monitor.looking and not self._warned_of_others:
            shared = [(window.passes, window.passes.arrivals) for window in _WINDOWS if window is not self]
        try:
            scaling.muted = True
            if create_graph or not loss.requires_grad:
                start = None if factor == 1.0 else torch.full_like(loss, factor)
                loss.backward(start, retain_graph=retain_graph, create_graph=create_graph)
            else:
                run_backward([loss], [self._start(loss, factor)], bool(retain_graph))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            scaling.muted = False
        one.weighed += self.passes.arrivals - before
        if not one.weighed:  # as far as is known in windows that look at three parameters
            self.passes.ordinary = False
        if shared and any(passes.arrivals != arrivals for passes, arrivals in shared):
            self._warned_of_others = True
            warnings.warn(
                "backward(loss, weight=...) of one optimizer also reached parameters of another wrapped one, whose "
                "gradients are multiplied by these weights, but divided by its own. Give each its own loss; or "
                "wrap both inner optimizers in one, Optimizer([a, b], steps=4).",
                stacklevel=4,
            )

    def _fail(self, error: BaseException) -> None:
        """A backward pass has failed, and may have left part of its gradient."""
        self._failure = error
        self.be_special()

    def _start(self, loss: Tensor, factor: float) -> Tensor:
        """What a backward pass starts from: a tensor of this factor, of which that of 1 is made once."""
        start = self._one if factor == 1.0 else None
        # A hook of the user's may have written to it.
        if start is None or start.dtype is not loss.dtype or start.device != loss.device or start._version:
            start = torch.full_like(loss, factor, requires_grad=False)
            if factor == 1.0:
                self._one = start
        return start

    def add_gradients(self, gradients: Sequence[Tensor | None], weight: Any) -> None:
        self.check_sum()
        one, before = self.window.micro_batch, self.passes.arrivals
        factor = self.window.weigh(weight)
        self.be_special()
        self.loss_scale.rescale_()
        if not one.weight:
            return  # gradients of rows that weigh nothing may be NaN
        for parameter, gradient in zip(self.buffer.parameters(), gradients, strict=True):
            if gradient is not None:
                add_gradient(parameter, gradient.detach() * factor)
        self.monitor.arrived()
        one.weighed += self.passes.arrivals - before

    # A micro-batch is counted.

    def begin_ordinary(self) -> None:
        """A window's first micro-batch came without a GradScaler, and is counted without a look."""
        self.loss_scale.scaled, self.saved, self.passes.open = False, False, True

    def count(self, scaled: Sequence[Any] = ()) -> bool:
        """Count the micro-batch, with a look at all that it may be. Returns whether the window closes with it."""
        window, monitor, one = self.window, self.monitor, self.window.micro_batch
        self.passes.ordinary = False
        if scaled and scaled[0] is None:
            self._check_unscaled()
            monitor.forget_values()  # `unscale_` has changed them, and raises no version
        self.check_sum()
        if self.passes.arrivals != one.weighed and one.weight is not None and one.factor != 1.0:
            raise mixed_error()
        if one.weight is None:  # it came through loss.backward(), or had no backward pass
            window.weigh()
        self._scale_sum(scaled)
        weight = one.weight
        closes = window.add()
        self.saved = False
        self._scale_arrivals(1.0)
        self._counted(bool(weight))
        if self.noise is not None and self.noise.waiting and window.weight > 0:
            self._measure(self.noise)
        if not closes and self.loss_scale.in_use:
            self.loss_scale.stay_open()
        self._settle()
        return closes

    def _counted(self, weighs: bool) -> None:
        if weighs:
            self.monitor.counted(self.window.closes_next)
        else:
            self.monitor.forget_arrivals()

    def _scale_sum(self, scaled: Sequence[Any]) -> None:
        """Have the sum in one scale, with that of a checkpoint in it."""
        scale, weight = self.loss_scale, self.window.micro_batch.weight
        unscaled = bool(scaled) and scaled[0] is None
        # One that weighs nothing has no say, unless `unscale_` has divided the others' sum in it.
        if (weight or unscaled) and (scaled or self.passes.arrivals or not self.monitor.idle):
            scale.check(bool(scaled))
        if not scaled:
            if self.buffer.restored is not None:
                self.buffer.join_restored()
                self.monitor.resync()
            return
        if not scale.known:
            scale.known = True
            self.build_stages()
        self.losses.unscale(self.window.micro_batches, scaled[0], scale.live)
        if weight or scale.in_use or self.ranks > 1:
            scale.add(scaled[0], scaled[1])
            self.monitor.resync()

    def _check_unscaled(self) -> None:
        """`scaler.unscale_` has divided what is in `p.grad`: right for a window that closes."""
        if not self.window.closes_next:
            raise WindowError(
                "scaler.unscale_() was called inside an open window, and the next gradient will be scaled again. Call "
                "it only if `optimizer.closes_next`, or not at all: the wrapper unscales, and clips with "
                "clip_grad_norm=. discard() drops the window."
            )

    def _settle(self) -> None:
        """Whether there is more in this window than gradients that autograd adds up."""
        more = self.buffer.restored is not None or self.loss_scale.in_use
        self.special = self._always_special or more
        looks = self.noise is not None or self.monitor.looking
        self.passes.ordinary = self.passes.open = self.window.is_open and not (more or looks)

    def _measure(self, noise: NoiseMeter) -> None:
        """Show the meter the sum so far: unscaled and over the weight, it is the mean of the micro-batches so far."""
        given, rows, weight = self.window.weights_given, self.window.micro_batch.in_batches, self.window.weight
        noise.unit, noise.counts_rows = "rows" if given or rows else "micro-batches", rows and not given
        scale = 1.0 if self.loss_scale.scale is None else self.loss_scale.scale.double()
        noise.micro_batch(self._held(), weight, weight / (self.window.unit or 1.0) * scale)

    def _held(self) -> list[Tensor]:
        return [g for g in self.buffer.get() if g is not None]

    def skip(self) -> None:
        """The micro-batch that was expected is over, counted or not: if not, it must not have left a gradient."""
        if self.window.micro_batches or self.window.micro_batch.announced:
            self.check_untouched()
        self._scale_arrivals(1.0)

    # The window's end.

    def finish(self) -> bool:
        """Turn the sum into the mean gradient in `p.grad`. Returns whether there is one to update with."""
        window, scale = self.window, self.loss_scale
        total = WindowTotal(self.buffer, window.divisor, window.weight, window.micro_batches)
        if self.special:
            self.buffer.join_restored(scale.scale)
            total.scale, total.overflow = scale.scale, False if scale.overflow is None else scale.overflow
            self._weigh(total)
        for stage in self.stages:
            if not stage(total):
                self.buffer.clear(self.set_to_none)
                return False
        if total.grad_norm is not None:
            self.grad_norm = total.grad_norm
        return True

    def _weigh(self, total: WindowTotal) -> None:
        window, size = self.window, self.ranks
        total.weight, total.divisor = window.weight, window.divisor / size  # the ranks' reduction leaves a mean
        weight = window.weight / (window.unit or 1)
        total.rows, total.multiple = window.weight, weight / total.divisor / size if total.divisor else 1.0

    # It is over.

    def close(self) -> None:
        """The update is made, or given up: the next micro-batch is the first of a new window."""
        self.loss_scale.scaled, self.saved, self.losses.over = None, False, True
        if self.special:
            self.buffer.close()
            self._restart()
        self.monitor.close()
        self.begin()
        self.passes.ordinary, self.passes.open = not (self.special or self.monitor.looking), False

    def empty(self) -> None:
        """Clear the gradients, too, in the way of the loop's own `zero_grad`."""
        if self.passes.ordinary and not self.passes.arrivals and self.window.micro_batch.weight is None:
            self.monitor.forget_update()  # all else is as `close` has left it
            self.buffer.clear(self.set_to_none)
            return
        self.loss_scale.scaled, self.saved = None, False
        self.window.micro_batch.restart()
        self.monitor.restart()
        self.passes.ordinary = False
        self.buffer.clear(self.set_to_none)
        if self.special:
            self._failure = None
            self._restart()
            self._settle()

    def _restart(self) -> None:
        self.loss_scale.close()
        if self.noise is not None:
            self.noise.restart()

    # Misuse.

    @property
    def in_progress(self) -> tuple[float, bool]:
        """What the micro-batch in progress weighs as far as is known, and whether the user said so."""
        one = self.window.micro_batch
        return (one.default, one.default_given) if one.weight is None else (one.weight, one.given)

    def check_failed(self) -> None:
        if self._failure is not None or (self.passes.unfinished and self.monitor.failed):
            raise failed_error(self._failure) from self._failure

    def check_sum(self) -> None:
        """Raise if a pass failed or somebody else changed the sum; in a window of one micro-batch, that may be fine."""
        self.check_failed()
        found, window = self.monitor.modification(), self.window
        if found is None:
            return
        late = found == "left" and window.steps > 1  # of a longer window, and this one ends with its epoch
        early = found == "edited" and self._reduces_later
        alone = not window.micro_batches and window.closes_next and not early and not late
        if not alone or (window.reduction == "sum" and window.micro_batch.given):
            raise modification_error(found)

    _reduces_later = False
    """Whether a gradient edited in a window of one micro-batch is perhaps still to be reduced over the ranks."""

    def check_untouched(self) -> None:
        self.check_failed()
        if self.passes.arrivals or self.window.micro_batch.weight is not None:
            raise untouched_error()


def _checked_loss(loss: Any) -> Tensor:
    if isinstance(loss, (Mapping, list)):
        raise TypeError(
            "backward() takes one loss, a scalar tensor. Received: a "
            f"{type(loss).__name__}. For several losses with a denominator each use gradaccum.torch.TrainStep, whose "
            "compute_loss may return {name: (loss, weight)}; losses over the same rows can be added: "
            "backward(a + b, weight=n)."
        )
    return checked_scalar(loss, "`loss`")


def checked_nonfinite(nonfinite: Any) -> Nonfinite:
    if nonfinite == "skip_micro_batch":
        raise ValueError(
            'nonfinite="skip_micro_batch" was removed, because it kept a second copy of the gradients. Leave out a '
            "micro-batch by its loss: optimizer.backward(loss, weight=n if loss.isfinite() else 0)."
        )
    checked: Nonfinite = checked_choice("nonfinite", nonfinite, get_args(Nonfinite))
    return checked
