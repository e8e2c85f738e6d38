"""The update: from the sum of a window's gradients to new parameters, by the user's own optimizers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.stages import Stage, WindowTotal, gradient_stages
from gradaccum.torch.distributed import SingleRank
from gradaccum.torch.layers import BackwardOptimizer, Layers, check_in_backward
from gradaccum.torch.optimizer import needs_closure
from gradaccum.torch.train_step.closure import Closure, takes_closure
from gradaccum.torch.train_step.options import Options, checked_optimizers
from gradaccum.torch.train_step.rollback import Rollback

__all__ = ["Update"]

logger = logging.getLogger("gradaccum")

_AS_THEY_WERE = "Parameters and optimizer state are as they were."
_UNKNOWN = "Parameters and optimizer state may have been changed by then: go on from a checkpoint."


class Update:
    """What happens once per window."""

    def __init__(self, optimizers: Any, meter: MemoryMeter, options: Options, noise: NoiseMeter | None = None) -> None:
        self.optimizers, demanding = checked_optimizers(optimizers)
        options.check_scaler(demanding)
        self.scaler, self.noise, self._options, self._meter = options.scaler, noise, options, meter
        self._parameters: list[Tensor] = []
        self.buffer = GradientBuffer(self.parameters, options.accumulate_dtype)
        self.stages: list[Stage] = gradient_stages(
            before_clipping=[] if self.scaler is None or not self._clips else [self._unscale],
            noise=noise,
            clip_grad_norm=options.clip_grad_norm,
            clip_grad_value=options.clip_grad_value,
            accumulates_wide=options.accumulate_dtype is not None,
        )
        """What makes the finished gradient of the sum: divide, measure, unscale, clip, cast."""
        self.grad_norm: Tensor | None = None
        self.in_backward: BackwardOptimizer | None = None
        """Makes the update block by block, where that is wanted."""
        self._closures: dict[torch.optim.Optimizer, Closure] = {}
        if self.scaler is None:  # which does not pass closures on
            for optimizer in self.optimizers:
                if optimizer in demanding:
                    self._closures[optimizer] = Closure(self.parameters, always_check=True)
                elif takes_closure(optimizer):
                    self._closures[optimizer] = Closure(functools.partial(parameters_of, [optimizer]))
        # The closures of LBFGS run whole windows, beside which copies cost nothing.
        self._rollback = Rollback(self.optimizers, meter, always=bool(demanding))
        self._scaler_involved = self._scaler_met = False

    @property
    def _clips(self) -> bool:
        return self._options.clip_grad_norm is not None or self._options.clip_grad_value is not None

    def parameters(self) -> list[Tensor]:
        """Every optimizer's parameters, each once: the same list, while they are the same."""
        found = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        known = self._parameters
        if len(found) != len(known) or not all(map(is_, found, known)):
            self._parameters = known = list({id(p): p for p in found}.values())
        return known

    def check_empty(self) -> None:
        """Raise if a parameter has a gradient already, other than zero."""
        if any(p.grad is not None and bool(p.grad.count_nonzero()) for p in self.parameters()):
            raise WindowError(
                "step.backward() found gradients in `.grad`, of another loss or of an update that has been made. It "
                "leaves the large batch's finished gradient there and nothing else: call optimizer.zero_grad() before "
                "it, and make one batch of the rows of several."
            )

    def clear(self) -> None:
        """Empty the sum of gradients."""
        self.buffer.clear()
        if self.noise is not None:
            self.noise.restart()

    def meet_scaler(self) -> None:
        """A GradScaler makes its state of the first loss, and a rank may have none before its first update."""
        if self.scaler is not None and not self._scaler_met:
            self.scaler.scale(torch.ones((), device=self._meter.device))
            self._scaler_met = True

    def by_blocks(self, layers: Layers, ranks: SingleRank, *, searched: bool) -> None:
        """Blocks take turns, and each is updated as soon as its gradient is in, where that is wanted."""
        layers.waits = ranks.sharded
        layers.ranks = ranks.by_blocks(layers.model, [block.module for block in layers.blocks])
        if layers.update != "in_backward":
            return
        closure = next((type(o).__name__ for o in self.optimizers if needs_closure(o)), None)
        check_in_backward(
            clips=self._options.clip_grad_norm is not None,
            scales=self.scaler is not None,
            closure=closure,
            searched=searched,
            replicated=ranks.is_distributed and not ranks.sharded,
        )
        layers.listener = self.in_backward = BackwardOptimizer(
            self.optimizers,
            self.buffer,
            layers.blocks,
            layers.model,
            self._meter,
            gradient_stages(clip_grad_value=self._options.clip_grad_value, accumulates_wide=True),
            is_distributed=ranks.is_distributed,
        )

    def abandon(self) -> None:
        """After an error: no gradients, and a scaler that has not heard of them."""
        self.clear()
        if self.scaler is not None and self._scaler_involved:  # it keeps account of what it has unscaled and stepped
            self.scaler.update(self.scaler.get_scale())
            self._scaler_involved = False

    def _unscale(self, total: WindowTotal) -> bool:
        """A stage: the scaler divides what each optimizer has by its scale."""
        self._scaler_involved = True
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return True

    def step(self, loss: Tensor, window: Callable[[], Tensor]) -> bool:
        """Run every optimizer on the finished gradients. Returns whether an update was made; an overflow makes none."""
        if self.in_backward is not None:  # it has been made, block by block
            return bool(self.in_backward.made)
        stepped: list[Any] = []
        of_the_window: list[BaseException] = []

        def evaluated() -> Tensor:
            try:
                return window()
            except BaseException as error:
                of_the_window.append(error)
                raise

        self._rollback.remember()
        for closure in self._closures.values():
            closure.begin(loss, evaluated)
        for optimizer in self.optimizers:
            try:
                self._step(optimizer, stepped)
            except BaseException as error:
                restored = self._rollback.restore()
                self._rollback.always |= is_out_of_memory(error)
                outcome = _AS_THEY_WERE if restored else _UNKNOWN
                if not is_out_of_memory(error) or error in of_the_window:
                    if not restored:
                        name = type(optimizer).__name__
                        logger.warning("%s.step() raised %s. %s", name, type(error).__name__, outcome)
                    raise
                raise torch.OutOfMemoryError(
                    f"Out of memory in {type(optimizer).__name__}.step(), which smaller micro-batches cannot help: "
                    f"{error}\n{outcome} Use an optimizer with less state, or torch.optim's foreach=False."
                ) from error
        for closure in self._closures.values():
            closure.end()
        if stepped:
            self._rollback.forget()
        if self.scaler is not None:
            self.scaler.update()
            self._scaler_involved = False
        return bool(stepped)

    def _step(self, optimizer: torch.optim.Optimizer, stepped: list[Any]) -> None:
        """One optimizer's step; notes it in `stepped`, unless an overflow has left it out."""
        if optimizer in self._closures:
            optimizer.step(self._closures[optimizer])  # type: ignore[arg-type]  # a closure may return a tensor
        elif self.scaler is None:
            optimizer.step()
        else:
            self._scaler_involved = True
            # The scaler leaves the step out after an overflow, or, of a fused optimizer, tells it of one: a hook is the
            # public way to know.
            hook = optimizer.register_step_post_hook(lambda o, *_: stepped.extend([] if _overflown(o) else [o]))
            try:
                self.scaler.step(optimizer)
            finally:
                hook.remove()
            return
        stepped.append(optimizer)


def _overflown(optimizer: Any) -> bool:
    """Whether the step that a GradScaler has a fused optimizer make does nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Every optimizer's parameters, each once."""
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())
