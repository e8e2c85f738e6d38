"""The update: from the sum of a window's gradients to new parameters, by the user's own optimizers."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.stages import Stage, WindowTotal, gradient_stages
from gradaccum.torch.distributed import ByBlocks, Ranks
from gradaccum.torch.layers import BackwardOptimizer, Layers
from gradaccum.torch.train_step.options import Options
from gradaccum.torch.train_step.rollback import Rollback

__all__ = ["Update"]

logger = logging.getLogger("gradaccum")

_AS_THEY_WERE = "Parameters and optimizer state are as they were."
_UNKNOWN = "Parameters and optimizer state may have been changed by then: go on from a checkpoint."


class Update:
    """What happens once per window."""

    def __init__(self, options: Options, meter: MemoryMeter, noise: NoiseMeter | None = None) -> None:
        options.check_optimizers()
        self.optimizers: list[torch.optim.Optimizer] = options.optimizers
        self.scaler, self.noise, self._options, self._meter = options.scaler, noise, options, meter
        self._parameters: list[Tensor] = []
        self.buffer = GradientBuffer(self.parameters, options.accumulate_dtype)
        clips = options.clip_grad_norm is not None or options.clip_grad_value is not None
        self.stages: list[Stage] = gradient_stages(
            before_clipping=[self._unscale] if self.scaler is not None and clips else [],
            noise=noise,
            clip_grad_norm=options.clip_grad_norm,
            clip_grad_value=options.clip_grad_value,
            accumulates_wide=options.accumulate_dtype is not None,
        )
        """What makes the finished gradient of the sum: divide, measure, unscale, clip, cast."""
        self.grad_norm: Tensor | None = None
        self.in_backward: BackwardOptimizer | None = None
        """Makes the update block by block, where that is wanted."""
        demanding = options.closures()
        self._closures: dict[torch.optim.Optimizer, _Closure] = {}
        if self.scaler is None:  # which does not pass closures on
            for optimizer in self.optimizers:
                if optimizer in demanding:
                    self._closures[optimizer] = _Closure(self.parameters, always_check=True)
                elif _takes_closure(optimizer):
                    self._closures[optimizer] = _Closure(functools.partial(_parameters_of, optimizer))
        # The closures of LBFGS run whole windows, beside which copies cost nothing.
        self._rollback = Rollback(self.optimizers, meter, always=bool(demanding))
        self._scaler_involved = self._scaler_met = False

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

    def meet_scaler(self) -> None:
        """A GradScaler makes its state of the first loss, and a rank may have none before its first update."""
        if self.scaler is not None and not self._scaler_met:
            self.scaler.scale(torch.ones((), device=self._meter.device))
            self._scaler_met = True

    def by_blocks(self, layers: Layers, ranks: Ranks) -> None:
        """Blocks take turns, and each is updated as soon as its gradient is in, where that is wanted."""
        layers.waits = ranks.sharded
        layers.ranks = ByBlocks(ranks, layers.model, [block.module for block in layers.blocks])
        if layers.update == "in_backward":
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
        self.buffer.clear()
        if self.noise is not None:
            self.noise.restart()
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

            def made(own: Any, *_: Any) -> None:
                overflow = getattr(own, "found_inf", None)  # of a fused optimizer, whose step does nothing then
                stepped.extend([] if overflow is not None and bool(overflow) else [own])

            # The scaler leaves the step out after an overflow: a hook is the public way to know.
            hook = optimizer.register_step_post_hook(made)
            try:
                self.scaler.step(optimizer)
            finally:
                hook.remove()
            return
        stepped.append(optimizer)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` may evaluate a closure more than once. Those of torch.optim call it at first."""
    step = type(optimizer).step
    return not step.__module__.startswith("torch.optim.") and "closure" in inspect.signature(step).parameters


class _Closure:
    """The closure that an optimizer evaluates: its first evaluation finds the gradients that are there.

    They are computed once more where the optimizer has moved parameters before it evaluates, as SAM does.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], *, always_check: bool = False) -> None:
        self._parameters, self._always_check = parameters, always_check
        self._evaluates_first: bool | None = None
        self._first = False
        self._loss: Tensor | None = None
        self._window: Callable[[], Tensor] | None = None
        self._found: list[float | None] | None = None

    def begin(self, loss: Tensor, window: Callable[[], Tensor]) -> None:
        """An update begins, with the finished gradients in place."""
        self._loss, self._window, self._first = loss, window, True
        self._found = self._norms() if self._evaluates_first is None else None

    def end(self) -> None:
        """The update has been made: let go of its batch."""
        self._loss = self._window = self._found = None

    def __call__(self) -> Tensor:
        assert self._loss is not None
        assert self._window is not None
        first, self._first = self._first, False
        return self._loss if first and self._untouched() else self._window()

    def _untouched(self) -> bool:
        if self._evaluates_first is not None:
            return self._evaluates_first
        untouched = self._found == self._norms()
        if not self._always_check:
            self._evaluates_first = untouched
        return untouched

    @torch.no_grad()
    def _norms(self) -> list[float | None]:
        """Norms of parameters and gradients: whatever moves them changes these."""
        parameters = self._parameters()
        return [None if tensor is None else _norm(tensor) for p in parameters for tensor in (p, p.grad)]


def _norm(tensor: Tensor) -> float:
    norm: Tensor = torch.linalg.vector_norm(tensor.to_dense() if tensor.is_sparse else tensor)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # of a sharded one: all ranks' shards
