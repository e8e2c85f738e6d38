"""The update: from the sum of a window's gradients to new parameters, by the user's own optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.gradients import GradientSum, clip_norm_, scale_
from gradaccum.torch.noise import NoiseMeter

__all__ = ["Update"]


class Update:
    """What happens once per window.

    Args:
        optimizers: One `torch.optim.Optimizer`, or several.
        clip_grad_norm: Largest 2-norm of the finished gradient over all of them, or None.
        scaler: A `torch.amp.GradScaler`, or None.
        accumulate_dtype: What narrower parameters' gradients are summed in, or None.
        noise: Measures the noise scale, or None.

    Raises:
        TypeError: Something else than optimizers.
        ValueError: One that accumulates by itself, or needs a closure together with a `scaler`.
    """

    def __init__(
        self,
        optimizers: Any,
        *,
        clip_grad_norm: float | None = None,
        scaler: Any = None,
        accumulate_dtype: torch.dtype | None = None,
        noise: NoiseMeter | None = None,
    ) -> None:
        self.noise = noise
        self.optimizers: list[torch.optim.Optimizer] = _checked_optimizers(optimizers)
        self.closures = [optimizer for optimizer in self.optimizers if _needs_closure(optimizer)]
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.closures and self.scaler is not None:
            raise ValueError(
                f"A GradScaler cannot step {type(self.closures[0]).__name__}, which evaluates a closure. "
                "Leave `scaler` out, and use autocast=torch.bfloat16."
            )
        self.clip_grad_norm = clip_grad_norm
        self.sums = GradientSum(self.parameters, accumulate_dtype)
        self.grad_norm: Tensor | None = None
        self._first = True

    def parameters(self) -> list[Tensor]:
        """Every optimizer's parameters, each once."""
        unique = {id(p): p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        return list(unique.values())

    def clear(self) -> None:
        """Empty the sum of gradients."""
        self.sums.clear()
        if self.noise is not None:
            self.noise.restart()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as the scaler wants it for the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def measure(self, multiple: float | Tensor, rows: int) -> None:
        """A micro-batch of so many rows is in, and the sum is this multiple of its mean gradient."""
        if self.noise is not None and self.noise.waiting:
            self.noise.micro_batch(self.sums.gradients(), rows, self._scale() * multiple)

    def _scale(self) -> float | Tensor:
        """What the scaler multiplies with, on its device."""
        return 1.0 if self.scaler is None else self.scaler.scale(torch.ones((), device=self.parameters()[0].device))

    def finish(self, divisor: float | Tensor | None, rows: int, mean: bool = True) -> None:
        """Make the sum the finished gradient: divide, unscale, clip, and give it the parameter's own dtype.

        Args:
            divisor: What the sum is to be divided by; None where it is complete.
            rows: Rows of the window.
            mean: Whether the result is a mean over the rows, not a sum.
        """
        if isinstance(divisor, Tensor):
            scale_(self.sums.gradients(), torch.where(divisor > 0, 1.0 / divisor, 0.0))
        elif divisor is not None:
            self.sums.finish(divisor)
        if self.noise is not None:
            self.noise.window(self.sums.gradients(), rows, self._scale() * (1.0 if mean else float(rows)))
        if self.clip_grad_norm is not None:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            self.grad_norm = clip_norm_(self.sums.gradients(), self.clip_grad_norm)
        self.sums.cast()

    def step(self, window: Callable[[], Tensor]) -> bool:
        """Run every optimizer on the finished gradients. Returns whether an update was made (an overflow makes none).

        Args:
            window: Computes the finished gradients anew and returns the loss, for optimizers that evaluate closures.

        Raises:
            torch.OutOfMemoryError: An optimizer ran out of memory; parameters and its state are as they were, or the
                message says that they aren't.
        """
        stepped: list[Any] = []
        for optimizer in self.optimizers:
            if optimizer in self.closures:
                optimizer.step(window)  # type: ignore[arg-type]  # a closure may return a tensor
                stepped.append(optimizer)
                continue
            before = _Before(optimizer, self._first)
            try:
                if self.scaler is None:
                    optimizer.step()
                    stepped.append(optimizer)
                else:
                    # The scaler leaves the step out after an overflow; a hook is the public way to know.
                    hook = optimizer.register_step_post_hook(lambda o, *_: stepped.append(o))
                    try:
                        self.scaler.step(optimizer)
                    finally:
                        hook.remove()
            except BaseException as error:
                restored = before.restore()
                if not is_out_of_memory(error):
                    raise
                raise torch.OutOfMemoryError(
                    f"Out of memory in {type(optimizer).__name__}.step(), which smaller micro-batches cannot help: "
                    f"{error}\n{restored} Use an optimizer with less state, or torch.optim's foreach=False."
                ) from error
        if self.scaler is not None:
            self.scaler.update()
        self._first = False
        return bool(stepped)


class _Before:
    """What an optimizer's step may change, and how to undo it.

    A copy of everything before every update would cost what accumulation is there to save. Optimizers run out of memory
    when they make their state, at the first update: there the copy is taken, on the host. Later on, the tensors'
    versions tell at least whether anything has changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copy: bool) -> None:
        self.optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.state: dict[Any, Any] = {p: dict(s) if isinstance(s, dict) else s for p, s in optimizer.state.items()}
        moving = [*parameters, *(t for s in self.state.values() if isinstance(s, dict) for t in _tensors(s))]
        self.versions = [(tensor, tensor._version) for tensor in moving]
        self.copies = [t.detach().to("cpu", copy=True) for t in moving] if copy else None

    @torch.no_grad()
    def restore(self) -> str:
        """Undo what can be undone. Returns a sentence about it."""
        moved = 0
        for index, (tensor, version) in enumerate(self.versions):
            if tensor._version != version:
                if self.copies is not None:
                    tensor.copy_(self.copies[index])
                else:
                    moved += 1
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        if moved:
            return (
                f"{moved} of {len(self.versions)} parameters and states had been updated by then: "
                "go on from a checkpoint."
            )
        return "Parameters and optimizer state are as they were."


def _tensors(state: dict[Any, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    listed = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for optimizer in listed:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "`optimizer` must be a torch.optim.Optimizer or a list of them. "
                f"Received: {optimizer!r} of type {type(optimizer).__name__}."
            )
        if hasattr(optimizer, "micro_batches") and hasattr(optimizer, "inner"):
            raise ValueError(
                f"TrainStep makes one update per call by itself. Received: {type(optimizer).__name__}, which "
                "accumulates, too. Give it the inner optimizer."
            )
    if not listed:
        raise ValueError("`optimizer` must be a torch.optim.Optimizer or a list of them. Received: an empty list.")
    return listed


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot do without a closure, as LBFGS'."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
