"""The open window of an optimizer on several ranks, which close their windows together and reduce once for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradaccum.on_torch.foreach import all_finite
from gradaccum.on_torch.grad_buffer import WindowTotal
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.stages import Unscale, gradient_stages
from gradaccum.torch.distributed import Listener, Ranks, Total
from gradaccum.torch.watch import GradientMonitor, ShardedMonitor, modification_error
from gradaccum.torch.window.gradient_window import GradientWindow


class RanksWindow(GradientWindow, Listener):
    """A `GradientWindow` whose sum and weight become those of all ranks at its end, by a stage of its own.

    Where a backward pass reduces the sum, its unit must be the other ranks' unit, too, and each gradient is multiplied
    on its way to the sum.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        noise: NoiseMeter | None,
        options: Mapping[str, Any],
        ranks: Ranks,
    ) -> None:
        self._ranks, self.ranks = ranks, ranks.size
        super().__init__(parameters, noise, options)
        self._always_special = self.special = True
        self.buffer.attach(ranks.engine.pending, ranks.engine.bucket_views)
        ranks.attach(self)
        self._reduces_later = not ranks.sharded

    def _monitor_of(self, parameters: Callable[[], list[Tensor]]) -> GradientMonitor:
        engine = self._ranks.engine
        if self._ranks.sharded:
            return ShardedMonitor(parameters, engine.pending)
        return GradientMonitor(parameters, engine.bucket_views)

    def build_stages(self) -> None:
        sum_over_ranks = self._ranks.engine.sum if self._ranks.sharded else None
        self.stages = gradient_stages(
            self._options, self._reduce, unscale=Unscale(), sum_over_ranks=sum_over_ranks, noise=self.noise
        )

    def begin(self) -> None:
        super().begin()
        if not self._ranks.manual_reduce:
            self.window.unit = self._ranks.unit

    # A micro-batch.

    def _take_unit_of(self, weight: float) -> float:
        if self._ranks.manual_reduce or self.window.unit is None:
            return super()._take_unit_of(weight)
        return weight / self.window.unit

    def _scale_arrivals(self, factor: float) -> None:
        if self._ranks.sharded:
            self._ranks.engine.scale(factor)
        else:
            super()._scale_arrivals(factor)

    def backward(self, loss: Any, weight: Any, retain_graph: bool | None, create_graph: bool) -> None:
        if weight is not None and self._ranks.sharded and self._ranks.unit is None:
            self.window.unit = None  # the ranks agree on one in this pass, by what it weighs
        super().backward(loss, weight, retain_graph, create_graph)

    def _leave_out(self, loss: Tensor, retain_graph: bool | None, create_graph: bool) -> None:
        if self._ranks.sharded:  # all ranks run the same passes
            self._run_backward(loss, 0.0, retain_graph, create_graph)
        else:
            super()._leave_out(loss, retain_graph, create_graph)

    def _run_backward(self, loss: Tensor, factor: float, retain_graph: bool | None, create_graph: bool) -> None:
        if self._ranks.sharded:
            self._ranks.engine.scale(1.0 if self.window.micro_batch.weight else 0.0)
        super()._run_backward(loss, factor, retain_graph, create_graph)

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._ranks.abort()

    def _counted(self, weighs: bool) -> None:
        super()._counted(weighs or self._ranks.sharded)

    def _measure(self, noise: NoiseMeter) -> None:
        if not self._ranks.reduced:
            super()._measure(noise)

    def _held(self) -> list[Tensor]:
        return super()._held() or self._ranks.engine.pending()

    def _settle(self) -> None:
        super()._settle()
        if self._ranks.sharded:
            self.passes.ordinary = self.passes.open = False

    def empty(self) -> None:
        if not self.passes.ordinary or self.passes.arrivals or self.window.micro_batch.weight is not None:
            self._ranks.engine.clear()
        super().empty()

    # The window's end.

    def _reduce(self, total: WindowTotal) -> bool:
        """Make the sum and its weight those of all ranks."""
        window, ranks, scale, manual_reduce = self.window, self._ranks, self.loss_scale, not self._ranks.reduced
        weights = window.weight, window.weights_given, window.largest
        mine = Total(*weights, *scale.agreement(not manual_reduce), window.equal, idle=not window.micro_batches)
        everybody = ranks.total(mine, self._rescale).total
        scale.agree(ranks.loss_scale)
        window.weight, window.weights_given = everybody.weight, everybody.given
        is_divided = scale.unscaled and not manual_reduce
        total.scale, total.overflow = None if is_divided else everybody.scale or None, everybody.overflow
        if everybody.scale and manual_reduce and ranks.sharded and not everybody.overflow:
            # The scaler has not seen what FSDP kept; each rank has looked at its shard.
            finite = all_finite(self.buffer.gradients())
            total.overflow = ranks.engine.sum((~finite).double()).item() > 0
        self._weigh(total)
        return True

    def _rescale(self, unit: float, scale: float) -> None:
        """All ranks are about to reduce: bring the sum to one unit and scale."""
        self.loss_scale.bring_to(scale)
        if self.window.reduction == "mean" and (factor := self.window.rescale(unit)) != 1.0:
            self.buffer.scale_(factor)

    # What `Ranks` calls.

    def share(self) -> Total | None:
        """What the window weighs with the micro-batch in progress; a GradScaler's verdict comes after its pass."""
        # Other ranks' scaler, where this one has had no micro-batch so far.
        if self.loss_scale.known or self._ranks.loss_scale:
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
        else:
            self.monitor.reduces = True

    def reduced(self) -> None:
        self.monitor.reduces = False
        self.monitor.resync()
        self.monitor.forget_update()  # DDP has put the same views into `p.grad`
