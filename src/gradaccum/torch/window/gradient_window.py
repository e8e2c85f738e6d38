"""The open window of gradient accumulation: count micro-batches, add weights, and finish the gradient at its end.

An ordinary micro-batch adds its weight, and nothing else. At the window's end one comparison shows whether autograd
alone has written the sum, and

    for stage in stages:
        if not stage(total):
            return False

leaves the mean gradient in `p.grad`. What else there may be (a GradScaler, several ranks, losses by name, the sum of a
checkpoint, micro-batches that are screened) makes a window `special`: then each micro-batch is looked at.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.core.window import Window, mixed_error
from gradaccum.errors import WindowError
from gradaccum.on_torch.foreach import all_finite, scale_, zeroed
from gradaccum.on_torch.grad_buffer import ArrivalScale, GradientBuffer, ScreenedBuffer, WindowTotal, add_gradient
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.private import run_backward
from gradaccum.on_torch.stages import Stage, Unscale, gradient_stages
from gradaccum.torch.distributed import Listener, Ranks, Total
from gradaccum.torch.loss import (
    LossAccumulator,
    NamedBuffer,
    Terms,
    checked_scalar,
    checked_terms,
    mixed_terms_error,
    not_by_name_error,
)
from gradaccum.torch.watch import GradientMonitor, ShardedMonitor, failed_error, modification_error, untouched_error
from gradaccum.torch.window.loss_scale import LossScale

logger = logging.getLogger("gradaccum")

_WINDOWS: weakref.WeakSet[GradientWindow] = weakref.WeakSet()

Nonfinite = Literal["propagate", "skip_window", "skip_micro_batch"]


class GradientWindow(Listener):
    """The open window of one optimizer, with its gradients.

    For each micro-batch: `expect` (optional) says what it weighs, gradients arrive through `backward` or by themselves,
    `count` counts it. When the window closes, `finish` leaves the mean gradient in `p.grad`, and `close` empties it.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        ranks: Ranks,
        noise: NoiseMeter | None,
        options: Mapping[str, Any],
    ) -> None:
        self.ranks, self.noise, self._options = ranks, noise, options
        reduction, dtype = options["reduction"], options["accumulate_dtype"]
        self.window = Window(reduction=reduction)
        self.screened = ScreenedBuffer(parameters, dtype) if options["nonfinite"] == "skip_micro_batch" else None
        self.named = NamedBuffer(parameters, dtype) if self.screened is None else None
        self.losses = LossAccumulator(reduction, self.named)
        self.buffer: GradientBuffer = self.screened or self.named  # type: ignore[assignment]  # one of the two is there
        if ranks.is_distributed:
            self.buffer.attach(ranks.engine.pending, ranks.engine.bucket_views)
        pending = ranks.engine.pending
        in_views = ranks.engine.bucket_views
        self.monitor = ShardedMonitor(parameters, pending) if ranks.sharded else GradientMonitor(parameters, in_views)
        self.passes = self.monitor.passes
        self.loss_scale = LossScale(self.buffer, self.monitor)
        self.arrival_scale = ArrivalScale(parameters)
        ranks.attach(self)
        self.grad_norm: Tensor | None = None
        self._failure: BaseException | None = None
        self.saved = False  # a checkpoint holds all of it: it may go on elsewhere
        self.set_to_none = True  # what the user's loop passes to `zero_grad`
        self._folded = self._warned_of_others = False
        self._one: Tensor | None = None  # what a backward pass starts from
        self._always_special = self.screened is not None or noise is not None or ranks.is_distributed
        self.begin()
        self.build_stages()
        _WINDOWS.add(self)

    def build_stages(self) -> None:
        ranks = self.ranks.is_distributed
        self.stages: list[Stage] = gradient_stages(
            self._options,
            self._screen if self.screened is not None else None,
            self._fold if self.named is not None and self.named.used and not ranks else None,
            self._reduce if ranks else None,
            unscale=Unscale() if self.loss_scale.known or ranks else None,
            sum_over_ranks=self.ranks.engine.sum if self.ranks.sharded else None,
            noise=self.noise,
        )

    def be_special(self) -> None:
        """There is more in this window than gradients that autograd adds up: each micro-batch is looked at."""
        self.special, self.passes.ordinary = True, False

    def begin(self) -> None:
        """An empty window; where a backward pass will reduce it, its unit must be the other ranks', too."""
        self.window.close()
        self.special, self.passes.ordinary = self._always_special, False
        if self.ranks.is_distributed and not self.ranks.manual_reduce:
            self.window.unit = self.ranks.unit

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
        elif window.reduction == "mean" and weight != window.unit and not self.losses.by_name:
            if self.ranks.is_distributed and not self.ranks.manual_reduce and window.unit is not None:
                arriving = weight / window.unit
            else:  # a gradient that comes through loss.backward() joins the sum as it is, so the sum takes its unit
                factor = window.rescale(weight)
                if window.micro_batches and factor != 1.0:
                    with self.monitor.resyncing():
                        self.buffer.scale_(factor)
        if arriving != 1.0:
            self.passes.ordinary = False
        self._scale_arrivals(arriving)

    def _scale_arrivals(self, factor: float) -> None:
        """What comes through `loss.backward()` cannot be multiplied there, so it is on its way to the sum."""
        if self.ranks.sharded:
            self.ranks.engine.scale(factor)
            return
        if factor == 0.0:
            self.window.micro_batch.without = self.buffer.missing()
        if factor != self.arrival_scale.factor:
            self.arrival_scale.set(factor)

    def backward(self, loss: Any, weight: Any, retain_graph: bool | None, create_graph: bool) -> None:
        if self._failure is not None or self.passes.unfinished:
            self.check_failed()
        window, one = self.window, self.window.micro_batch
        if type(loss) is not Tensor or loss.ndim:
            if isinstance(loss, (Mapping, list)):
                self._backward_named(checked_terms(loss, weight), retain_graph, create_graph)
                return
            loss = checked_scalar(loss, "`loss`")
        if self.special and self.losses.by_name:
            raise mixed_terms_error()
        if one.weight is None and not window.micro_batches:
            self.losses.restart()
        if weight is not None and self.ranks.sharded and self.ranks.unit is None:
            window.unit = None  # the ranks agree on one in this pass, by what it weighs
        factor = window.weigh(weight)
        if one.weight:
            self.losses.add(window.micro_batches, loss, one.weight, one.given)
        elif not self.ranks.sharded:
            self.loss_scale.rescale_()  # no backward pass will do it
            self._reach(loss)
            return
        self._run_backward(loss, factor, retain_graph, create_graph)

    def _backward_named(self, terms: Terms, retain_graph: bool | None, create_graph: bool) -> None:
        window, one = self.window, self.window.micro_batch
        counts = {name: term for name, term in terms.items() if term.weight}
        named = self._checked_names(counts)
        if not named.used:
            named.used = True
            self.ranks.reduce_manually()  # each sum is divided by its own total before they are one
            self.build_stages()
        self.be_special()
        if one.weight is None and not window.micro_batches:
            self.losses.restart()
        if one.weight is None or (counts and one.weight == 0):
            one.weight = None
            window.weigh(float(bool(counts)))
        if not counts:
            self.loss_scale.rescale_()  # no backward pass will do it
        if nothing := [loss for loss, weight in terms.values() if not weight]:
            self._reach(*nothing)
        how = {"retain_graph": retain_graph, "create_graph": create_graph}
        self.losses.backward_each(window.micro_batches, counts, self.monitor.resyncing, self._run_backward, **how)

    def _reach(self, *losses: Tensor) -> None:
        """What losses that weigh nothing lead to has a gradient of zero, as in the large batch."""
        one, before = self.window.micro_batch, self.passes.arrivals
        one.without = one.without or self.buffer.missing()
        self.buffer.reach(*losses, alone=not self.ranks.is_distributed, changing=self.monitor.resyncing)
        one.weighed += self.passes.arrivals - before

    def _checked_names(self, names: Iterable[Hashable]) -> NamedBuffer:
        """Where losses by name add up; raises if they cannot."""
        window, one, named = self.window, self.window.micro_batch, self.named
        if named is None or self.noise is not None or self.ranks.sharded or one.default_given:
            raise not_by_name_error()
        if not named.sums and (window.weight > 0 or one.weight):
            raise mixed_terms_error()
        if self.ranks.is_distributed and not self.ranks.waits:
            raise WindowError(
                "On several ranks, named losses, backward({name: (loss, weight)}), came after a first window without: "
                "since then the ranks reduce a single loss in its backward pass. Use names from the first window on."
            )
        for name in set(named.sums).intersection(names):
            if window.micro_batches in self.losses.sums[name].weights:
                raise ValueError(
                    f"The loss term {name!r} came twice in one micro-batch. One weight can't describe two means over "
                    "the same rows: give each its own name, or add them first, "
                    "backward({'a': (loss_1 + loss_2, weight)})."
                )
        return named

    def _run_backward(self, loss: Tensor, factor: float, retain_graph: bool | None, create_graph: bool) -> None:
        one, scaling = self.window.micro_batch, self.arrival_scale
        before, shared = self.passes.arrivals, None
        if factor != 1.0 and self.monitor.looking and not self._warned_of_others:
            shared = [(window.passes, window.passes.arrivals) for window in _WINDOWS if window is not self]
        try:
            if self.ranks.sharded:
                self.ranks.engine.scale(1.0 if one.weight else 0.0)
            scaling.muted = True
            if create_graph or not loss.requires_grad:
                start = None if factor == 1.0 else torch.full_like(loss, factor)
                loss.backward(start, retain_graph=retain_graph, create_graph=create_graph)
            else:
                run_backward([loss], [self._start(loss, factor)], bool(retain_graph))
        except BaseException as error:
            self._failure = error
            self.be_special()
            self.ranks.abort()
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
                "gradients are multiplied by these weights, but divided by its own. Give both the weights, "
                "a.batches(b.batches(loader, weight=count), weight=count), and call loss.backward().",
                stacklevel=4,
            )

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
        if self.losses.by_name:
            raise mixed_terms_error()
        one, before = self.window.micro_batch, self.passes.arrivals
        factor = self.window.weigh(weight)
        self.be_special()
        self.loss_scale.rescale_()
        for parameter, gradient in zip(self.buffer.parameters(), gradients, strict=True):
            if gradient is not None:  # of rows that weigh nothing it may be NaN, and counts as 0
                gradient = gradient.detach() * factor if one.weight else zeroed(gradient)
                add_gradient(parameter, gradient)
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
        if self.passes.arrivals != one.weighed:
            if self.losses.by_name:
                raise mixed_terms_error()
            if one.weight is not None and one.factor != 1.0:
                raise mixed_error()
        if one.weight is None:  # it came through loss.backward(), or had no backward pass
            window.weigh()
        self._scale_sum(scaled)
        weight = one.weight
        closes = window.add()
        self.saved = False
        self._scale_arrivals(1.0)
        if self.screened is not None:
            self.screened.add()
            monitor.resync()  # its gradient has moved into the sum
        if weight or self.ranks.sharded:
            monitor.counted(window.closes_next)
        else:
            monitor.forget_arrivals()
        if self.noise is not None and self.noise.waiting and window.weight > 0 and not self.ranks.reduced:
            self._measure(self.noise)
        if not closes and self.loss_scale.in_use:
            self.loss_scale.stay_open()
        self._settle()
        return closes

    def _scale_sum(self, scaled: Sequence[Any]) -> None:
        """Have the sum in one scale, with that of a checkpoint in it."""
        scale, weight, screened = self.loss_scale, self.window.micro_batch.weight, self.screened is not None
        unscaled = bool(scaled) and scaled[0] is None
        # One that weighs nothing has no say, unless `unscale_` has divided the others' sum in it.
        if (weight or unscaled) and not screened and (scaled or self.passes.arrivals or not self.monitor.idle):
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
        if screened and not unscaled:
            scale_(self.buffer.gradients(), scaled[0].reciprocal())
        if not screened and (weight or scale.in_use or self.ranks.is_distributed):
            scale.add(scaled[0], scaled[1])
            self.monitor.resync()

    def _check_unscaled(self) -> None:
        """`scaler.unscale_` has divided what is in `p.grad`: a window that closes, or a micro-batch to screen."""
        if self.screened is not None:
            return
        if self.named is not None and len(self.named.sums) > 1:
            raise WindowError(
                "Named losses have several sums of gradients, and scaler.unscale_() reaches only one. Remove it: the "
                "wrapper unscales, and clips with clip_grad_norm=. discard() drops the window."
            )
        if not self.window.closes_next:
            raise WindowError(
                "scaler.unscale_() was called inside an open window, and the next gradient will be scaled again. Call "
                "it only if `optimizer.closes_next`, or not at all: the wrapper unscales, and clips with "
                "clip_grad_norm=. discard() drops the window."
            )

    def _settle(self) -> None:
        """Whether there is more in this window than gradients that autograd adds up."""
        more = self.buffer.restored is not None or self.loss_scale.in_use or self.losses.by_name
        self.special = self._always_special or more
        looks = self.screened is not None or self.noise is not None or self.ranks.sharded or self.monitor.looking
        self.passes.ordinary = self.passes.open = self.window.is_open and not (more or looks)

    def _measure(self, noise: NoiseMeter) -> None:
        """Show the meter the sum so far: unscaled and over the weight, it is the mean of the micro-batches so far."""
        given, rows, weight = self.window.weights_given, self.window.micro_batch.in_batches, self.window.weight
        noise.unit, noise.counts_rows = "rows" if given or rows else "micro-batches", rows and not given
        scale = 1.0 if self.loss_scale.scale is None else self.loss_scale.scale.double()
        held = [g for g in self.buffer.get() if g is not None] or self.ranks.engine.pending()
        noise.micro_batch(held, weight, weight / (self.window.unit or 1.0) * scale)

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
        window, size = self.window, self.ranks.size
        total.weight, total.divisor = window.weight, window.divisor / size  # the ranks' reduction leaves a mean
        weight = window.weight / (window.unit or 1)
        total.rows, total.multiple = window.weight, weight / total.divisor / size if total.divisor else 1.0

    # Stages of its own: what they need of torch's shell, no other has.

    def _screen(self, total: WindowTotal) -> bool:
        """Leave out micro-batches that were not finite, and have the sum of the rest in `p.grad`."""
        assert self.screened is not None
        counted = self.screened.present()
        self.losses.dropped = {index for index, counts in enumerate(counted) if not counts}
        if self.losses.dropped:
            logger.warning("Left out %d of %d micro-batches: gradient not finite", counted.count(False), len(counted))
        self.window.weight = math.fsum(w for w, counts in zip(self.window.weights, counted, strict=True) if counts)
        self._weigh(total)
        return True

    def _fold(self, total: WindowTotal) -> bool:
        if self.losses.by_name:
            self.losses.fold()
            total.divisor = None
        return True

    def _reduce(self, total: WindowTotal) -> bool:
        """Make the sum and its weight those of all ranks."""
        window, ranks, scale, manual_reduce = self.window, self.ranks, self.loss_scale, not self.ranks.reduced
        weights = window.weight, window.weights_given, window.largest
        idle, by_name, scales = not window.micro_batches, self.losses.by_name, scale.agreement(not manual_reduce)
        mine = Total(*weights, *scales, window.equal, idle=idle, by_name=by_name)
        self._folded = False
        everybody = ranks.total(mine, self._rescale)
        scale.agree(ranks.loss_scale)
        window.weight, window.weights_given = everybody.weight, everybody.given
        is_divided = scale.unscaled and not manual_reduce
        total.scale, total.overflow = None if is_divided else everybody.scale or None, everybody.overflow
        if everybody.scale and manual_reduce and ranks.sharded and not everybody.overflow:
            # The scaler has not seen what FSDP kept; each rank has looked at its shard.
            finite = all_finite(self.buffer.gradients())
            total.overflow = ranks.engine.sum((~finite).double()).item() > 0
        self._weigh(total)
        if self._folded:
            total.divisor = 1 / ranks.size  # the reduction leaves a mean over the ranks
        return True

    def _rescale(self, unit: float, scale: float, by_name: bool) -> None:
        """All ranks are about to reduce: bring the sum to one unit and scale, those of losses by name to one sum."""
        self.loss_scale.bring_to(scale)
        if by_name:
            self.losses.fold(self.ranks.sum_by_name(self.losses.weights()))
            self._folded = True
        elif self.window.reduction == "mean" and (factor := self.window.rescale(unit)) != 1.0:
            self.buffer.scale_(factor)

    # What `ranks` calls: a `gradaccum.torch.distributed.Listener`.

    @property
    def in_progress(self) -> tuple[float, bool]:
        """What the micro-batch in progress weighs as far as is known, and whether the user said so."""
        one = self.window.micro_batch
        return (one.default, one.default_given) if one.weight is None else (one.weight, one.given)

    def share(self) -> Total | None:
        """What the window weighs with the micro-batch in progress; a GradScaler's verdict comes after its pass."""
        if self.loss_scale.known or self.ranks.loss_scale:  # other ranks', where this one has had no micro-batch so far
            return None
        window, (weight, given) = self.window, self.in_progress
        given, total = given or window.weights_given, window.weight + weight
        equal = not (given or window.micro_batch.in_batches) and total > 0 and window.reduction == "mean"
        return Total(total, given, max(window.largest, weight), equal=equal)

    def own_unit(self) -> float:
        window, (weight, _) = self.window, self.in_progress
        return (window.unit or weight) if weight and window.reduction == "mean" else float(weight > 0)

    def take_unit(self, unit: float) -> float:
        factor = (self.own_unit() or unit) / unit
        self.window.rescale(unit)
        return factor

    def forward_starts(self, loss_scale: float) -> None:
        if self.window.is_open:
            self.check_sum()  # the backward pass adds to it, and reduces it
        self.loss_scale.adopt(loss_scale)

    def pass_begins(self) -> None:
        if self.passes.arrivals:
            return
        if self.window.is_open:
            self.check_sum()  # the user's code has run since the forward pass began
        elif self.window.steps > 1 and self.monitor.left:
            raise modification_error("left")

    def backward_starts(self) -> None:
        if isinstance(self.monitor, ShardedMonitor):
            self.monitor.pass_begins()
            self.loss_scale.bring()  # DDP says so behind its first gradients

    def reduced(self) -> None:
        self.monitor.resync()
        self.monitor.forget_update()  # DDP has put the same views into `p.grad`

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
            self.ranks.engine.clear()
            self._failure = None
            self._restart()
            self._settle()

    def _restart(self) -> None:
        self.loss_scale.close()
        if self.noise is not None:
            self.noise.restart()

    # Misuse.

    def check_failed(self) -> None:
        if self._failure is not None or (self.passes.unfinished and self.monitor.failed):
            raise failed_error(self._failure) from self._failure

    def check_sum(self) -> None:
        """Raise if a pass failed or somebody else changed the sum; in a window of one micro-batch, that may be fine."""
        self.check_failed()
        found, window = self.monitor.modification(), self.window
        if found is None:
            return
        early = found == "edited" and self.ranks.is_distributed and not self.ranks.sharded  # reduced later, perhaps
        late = found == "left" and window.steps > 1  # of a longer window, and this one ends with its epoch
        alone = not window.micro_batches and window.closes_next and not early and not late
        if not alone or (window.reduction == "sum" and window.micro_batch.given):
            raise modification_error(found)

    def check_untouched(self) -> None:
        self.check_failed()
        if self.passes.arrivals or self.window.micro_batch.weight is not None:
            raise untouched_error()
