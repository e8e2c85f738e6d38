"""The update: from the sum of a window's gradients to new parameters, by the user's own optimizers."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.foreach import values_of
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory, local_part
from gradaccum.on_torch.stages import Stage, Unscale, gradient_stages
from gradaccum.torch.train_step.options import Options

logger = logging.getLogger("gradaccum")

_AS_THEY_WERE = "Parameters and optimizer state are as they were."
_UNKNOWN = "Parameters and optimizer state may already have changed: continue from a checkpoint."


class Update:
    """What happens once per window."""

    def __init__(self, options: Options, meter: MemoryMeter, noise: Any = None) -> None:
        options.check_optimizers()
        self.optimizers: list[torch.optim.Optimizer] = options.optimizers
        self.scaler, self.noise, self._meter = options.scaler, noise, meter
        self._parameters: list[Tensor] = []
        self.buffer = GradientBuffer(self.parameters, options.gradients["accumulate_dtype"])
        unscale = None if self.scaler is None else Unscale(self._unscale)
        self.stages: list[Stage] = gradient_stages(options.gradients, unscale=unscale, noise=noise)
        """What makes the finished gradient of the sum: divide, unscale, measure, clip, cast."""
        self.grad_norm: Tensor | None = None
        demanding = options.closures()
        self._closures: dict[torch.optim.Optimizer, _Closure] = {}
        if self.scaler is None:  # which does not pass closures on
            for optimizer in self.optimizers:
                if optimizer in demanding:
                    self._closures[optimizer] = _Closure(self.parameters, always_check=True)
                elif _takes_closure(optimizer):
                    self._closures[optimizer] = _Closure(functools.partial(_parameters_of, optimizer))
        self._snapshots = True  # whether the next step may have to be taken back: the first one makes the state
        self._always_snapshots = bool(demanding)
        """So it is with closures that run whole windows, beside which copies cost nothing."""
        self._scaler_involved = self._scaler_met = False

    def parameters(self) -> list[Tensor]:
        """Every optimizer's parameters, each once: the same list, while they are the same."""
        found = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        known = self._parameters
        if len(found) != len(known) or not all(map(is_, found, known)):
            self._parameters = known = list({id(p): p for p in found}.values())
        return known

    def check_empty(self) -> None:
        if any(p.grad is not None and bool(values_of(p.grad).count_nonzero()) for p in self.parameters()):
            raise WindowError(
                "step.backward() found gradients in `.grad`, of another loss or of an earlier update, and would add to "
                "them. Call optimizer.zero_grad() before it; to train on several batches at once, join their rows."
            )

    def meet_scaler(self) -> None:
        """A GradScaler makes its state of the first loss, and a rank may have none before its first update."""
        if self.scaler is not None and not self._scaler_met:
            self.scaler.scale(torch.ones((), device=self._meter.device))
            self._scaler_met = True

    def abandon(self) -> None:
        """After an error: no gradients, and a scaler that has not heard of them."""
        self.buffer.clear()
        if self.noise is not None:
            self.noise.restart()
        if self.scaler is not None and self._scaler_involved:  # it keeps account of what it has unscaled and stepped
            self.scaler.update(self.scaler.get_scale())
            self._scaler_involved = False

    def _unscale(self) -> None:
        self._scaler_involved = True
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

    def step(self, loss: Tensor, window: Callable[[], Tensor]) -> bool:
        """Run every optimizer on the finished gradients. Returns whether an update was made; an overflow makes none."""
        before = _Snapshot.of(self.optimizers) if self._snapshots else None
        for closure in self._closures.values():
            closure.begin(loss, window)
        stepped = False
        for optimizer in self.optimizers:
            try:
                stepped |= self._step(optimizer)
            except BaseException as error:
                self._failed(optimizer, error, before)
                raise
        for closure in self._closures.values():
            closure.end()
            self._always_snapshots |= closure.reran
        if stepped:
            self._snapshots = self._always_snapshots
        if self.scaler is not None:
            self.scaler.update()
            self._scaler_involved = False
        return stepped

    def _step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.scaler is None:
            optimizer.step(*[self._closures[optimizer]] if optimizer in self._closures else ())
            return True
        self._scaler_involved, made = True, []
        # The scaler leaves the step out after an overflow: a hook is the public way to know. A fused optimizer's step
        # does nothing then.
        hook = optimizer.register_step_post_hook(lambda own, *_: made.append(not getattr(own, "found_inf", None)))
        try:
            self.scaler.step(optimizer)
        finally:
            hook.remove()
        return any(made)

    def _failed(self, optimizer: torch.optim.Optimizer, error: BaseException, before: _Snapshot | None) -> None:
        """Take back what optimizers have done; raises where memory ran out in a step."""
        name, outcome, ran_out = type(optimizer).__name__, _UNKNOWN, is_out_of_memory(error)
        self._always_snapshots |= ran_out or any(closure.reran for closure in self._closures.values())
        self._snapshots |= self._always_snapshots
        if before is not None:
            before.put_back()
            outcome = _AS_THEY_WERE
        if ran_out and all(error is not closure.error for closure in self._closures.values()):
            raise torch.OutOfMemoryError(
                f"Out of memory in {name}.step(), which smaller micro-batches cannot help: {error}\n{outcome} Use an "
                "optimizer with less state, or torch.optim's foreach=False."
            ) from error
        if before is None and ran_out:  # the window's own error says that nothing has changed
            raise torch.OutOfMemoryError(
                f"Out of memory where {name}.step() evaluates its closure again, even with the smallest micro-batches: "
                f"{error.__cause__ or error}\n{outcome}"
            ) from error
        if before is None:
            logger.warning("%s.step() raised %s. %s", name, type(error).__name__, outcome)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    step = type(optimizer).step
    return not step.__module__.startswith("torch.optim.") and "closure" in inspect.signature(step).parameters


class _Closure:
    """The closure that an optimizer evaluates: its first evaluation finds the gradients that are there.

    They are computed once more where the optimizer has moved parameters before it evaluates, as SAM does.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], *, always_check: bool = False) -> None:
        self._parameters, self._always_check = parameters, always_check
        self._evaluates_first: bool | None = None
        self._loss: Tensor | None = None
        self._window: Callable[[], Tensor] | None = None
        self._found: list[float | None] | None = None
        self.reran = False
        """Whether it has ever run a window: then optimizers have moved parameters by the time that memory runs out."""
        self.error: BaseException | None = None  # what the window has raised that was evaluated last

    def begin(self, loss: Tensor, window: Callable[[], Tensor]) -> None:
        """An update begins, with the finished gradients in place."""
        self._loss, self._window, self.error = loss, window, None
        self._found = self._norms() if self._evaluates_first is None else None

    def end(self) -> None:
        self._loss = self._window = self._found = None

    def __call__(self) -> Tensor:
        assert self._window is not None
        loss, self._loss = self._loss, None
        if loss is not None and self._untouched():
            return loss
        self.reran = True
        try:
            return self._window()
        except BaseException as error:
            self.error = error
            raise

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
        return [None if t is None else _norm(t) for p in self._parameters() for t in (p, p.grad)]


def _norm(tensor: Tensor) -> float:
    norm: Tensor = torch.linalg.vector_norm(tensor.to_dense() if tensor.is_sparse else tensor)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # of a sharded one: all ranks' shards


class _Snapshot:
    """Parameters, parameter groups and optimizer state, in host memory, so that a step that fails is taken back.

    Steps write in place, and a copy of everything before each update would cost what accumulation is there to save.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._states = [(o.state, [(key, state, _copied(state)) for key, state in o.state.items()]) for o in optimizers]
        self._groups = [(group, dict(group)) for o in optimizers for group in o.param_groups]
        found = [tensor for o in optimizers for tensor in _tensors(o)]
        self._values = [
            (t, t.to("cpu", copy=True)) for t in map(local_part, {id(t): t.detach() for t in found}.values())
        ]

    @classmethod
    def of(cls, optimizers: Sequence[torch.optim.Optimizer]) -> _Snapshot | None:
        """None where memory is too short even for that: the step may still go well."""
        try:
            return cls(optimizers)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    @torch.no_grad()
    def put_back(self) -> None:
        for own, states in self._states:
            own.clear()
            for key, state, copy in states:
                if isinstance(state, dict):  # the same one: schedulers and hooks may hold it
                    state.clear()
                    state.update(copy)
                own[key] = state if isinstance(state, dict) else copy
        for group, copy in self._groups:
            group.clear()
            group.update(copy)
        for tensor, value in self._values:
            tensor.copy_(value)


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [leaf for group in optimizer.param_groups for _, leaf in leaves(group)]
    values += [leaf for state in optimizer.state.values() for _, leaf in leaves(state)]
    return [value for value in values if isinstance(value, Tensor)]


def _copied(state: Any) -> Any:
    """The same tensors and numbers in containers of their own."""
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(value) for value in state)
    return state
