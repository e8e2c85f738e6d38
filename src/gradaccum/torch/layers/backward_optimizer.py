"""Optimizer steps in backward: a block's parameters are updated, and their gradients freed, as soon as it is done."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import format_bytes
from gradaccum.errors import WindowError
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory, local_part
from gradaccum.on_torch.private import without_global_step_hooks
from gradaccum.on_torch.stages import Stage, WindowTotal, run_stages
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.per_parameter import check_own_step, check_per_parameter, limited_to

__all__ = ["BackwardOptimizer", "BlockListener", "Window", "parameters_by_block"]

logger = logging.getLogger("gradaccum")


class Window(Protocol):
    """What the micro-batches' losses have added up to."""

    @property
    def loss(self) -> Tensor:
        """The large batch's loss."""

    @property
    def divisor(self) -> Any:
        """What the gradients are to be divided by; None where they are complete."""

    @property
    def empty(self) -> bool:
        """Whether nothing weighs anything."""

    def check(self) -> None:
        """Raise if the micro-batches don't add up to what was counted."""


class BlockListener(Protocol):
    """Learns when a block's gradients are finished."""

    made: bool | None
    """Whether the window that has just run has made its update; None before its first part."""

    def open(self) -> None:
        """A window begins."""

    def begin(self, window: Window, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        """All losses are in. `reached`: of parameters outside of blocks' calls, by id, the block that finishes them."""

    def finished(self, place: int) -> None:
        """The gradients that wait for the block at this place are finished; -1: those of what stands before all."""

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise in place of one that comes in the middle."""


def parameters_by_block(
    parameters: Iterable[Tensor], blocks: Sequence[Block], model: nn.Module, reached: Mapping[int, int]
) -> dict[int, list[Tensor]]:
    """After which block's backward passes each parameter has its gradient, by the block's place; -1: after all.

    Example:
        >>> first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> model = nn.Sequential(first, second)
        >>> found = parameters_by_block(model.parameters(), [Block("1", second)], model, {})
        >>> [(place, [p is second.weight for p in due]) for place, due in found.items()]
        [(-1, [False]), (0, [True])]
    """
    last: dict[int, int] = dict(reached)
    for place, block in reversed(list(enumerate(blocks))):
        last.update((id(p), min(place, last.get(id(p), place))) for p in block.module.parameters())
    inside = {id(module) for block in blocks for module in block.module.modules()}
    for module in model.modules():
        if id(module) not in inside:
            last.update((id(p), -1) for p in module.parameters(recurse=False))
    due: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        due.setdefault(last.get(id(parameter), -1), []).append(parameter)
    return due


class BackwardOptimizer:
    """The user's own optimizers, each of whose steps is made in parts: for one block after the other.

    `stages` finish a block's gradients. Ranks that share the update must not begin it again once it has begun on any.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        sums: GradientBuffer,
        blocks: Sequence[Block],
        model: nn.Module,
        gauge: MemoryMeter,
        stages: Sequence[Stage],
        *,
        is_distributed: bool = False,
    ) -> None:
        self._optimizers, self._sums, self._blocks = optimizers, sums, blocks
        self._model, self._gauge, self._stages, self._is_distributed = model, gauge, stages, is_distributed
        self._state_bytes: dict[int, list[float]] = {}
        self.late: list[str] = []
        """Parameters, by name, whose gradient went on arriving in a rehearsal when they would have been updated."""
        self.open()

    def open(self) -> None:
        """A window begins: nothing of it has been updated."""
        self.made: bool | None = None
        self._updated, self._begun, self._rehearsal, self._empty = set[int](), False, False, False
        self._due: dict[int, list[Tensor]] = {}
        self._divisor: Any = None
        self._seen: list[tuple[Tensor, Tensor | None, int]] = []
        for optimizer in self._optimizers:
            if optimizer._optimizer_step_pre_hooks:
                raise ValueError(
                    f"{type(optimizer).__name__} has hooks of register_step_pre_hook, which look at all gradients, and "
                    "with update='in_backward' these are never there together. Use update='after_backward'."
                )
            check_own_step(optimizer)
            sizes = self._state_bytes.get(id(optimizer))
            if sizes is None or len(sizes) != len(optimizer.param_groups):
                self._state_bytes[id(optimizer)] = check_per_parameter(optimizer)

    def begin(self, window: Window, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        """All losses are in, and the last block's turn comes: check what can be checked before any update."""
        self._rehearsal = rehearsal  # which updates nothing, and looks whether gradients are finished when it would
        if not rehearsal:
            window.check()
            self._empty, self._divisor = window.empty, window.divisor
            if not self._empty and not math.isfinite(loss := float(window.loss)):
                raise ValueError(
                    f"The loss of this batch is {loss}. With update='in_backward' blocks would be updated before "
                    "anybody could see all gradients, so nothing has been. Leave the batch out, or use "
                    "update='after_backward'."
                )
            self._check_room()
        self._due = parameters_by_block(self._sums.parameters(), self._blocks, self._model, reached)

    def _check_room(self) -> None:
        missing = 0.0
        for optimizer in self._optimizers:
            for group, bytes_ in zip(optimizer.param_groups, self._state_bytes[id(optimizer)], strict=True):
                here = [p for p in group["params"] if p.requires_grad and p.device == self._gauge.device]
                new = [p for p in here if p not in optimizer.state]
                missing += sum(local_part(p).numel() * min(bytes_, 4.0 * p.element_size()) for p in new)
        limit = self._gauge.limit() if missing else None
        if limit is not None and self._gauge.live() + missing > limit:
            raise torch.OutOfMemoryError(
                f"The optimizers' state needs {format_bytes(int(missing))}, and "
                f"{format_bytes(max(int(limit - self._gauge.live()), 0))} are free. Nothing has been updated. Use an "
                "optimizer with less state."
            )

    @torch.no_grad()
    def finished(self, place: int) -> None:
        """The gradients are finished that wait for this block, or for what stands before all blocks (-1)."""
        parameters = self._due.pop(place, [])
        self._begun = not self._rehearsal
        if self._rehearsal:
            self._seen += [(p, p.grad, _version(p.grad)) for p in parameters]
            if place < 0:
                self.late = self._names(
                    {id(p) for p, grad, then in self._seen if p.grad is not grad or _version(grad) != then}
                )
            return
        if self._empty:
            _free(parameters)
        else:
            self._update([p for p in parameters if p.grad is not None])
        if place < 0:
            late = [p for p in self._sums.parameters() if id(p) in self._updated and p.grad is not None]
            if late:
                raise WindowError(
                    f"{len(late)} parameters got a gradient after their update, the first of shape "
                    f"{tuple(late[0].shape)}: something else than their own block uses them, and no graph has shown it."
                )
            self.made = not self._empty
            if self.made:
                self._call_hooks()

    def _update(self, parameters: list[Tensor]) -> None:
        if not parameters:
            return
        of_the_block = copy.copy(self._sums)
        of_the_block.parameters, of_the_block.pending = lambda: parameters, list
        run_stages(self._stages, WindowTotal(of_the_block, self._divisor))
        wanted = {id(p) for p in parameters}
        self.made = False
        self._updated |= wanted
        for optimizer in self._optimizers:
            self._step(optimizer, wanted)
        _free(parameters)

    def _step(self, optimizer: torch.optim.Optimizer, wanted: set[int]) -> None:
        hooks = optimizer._optimizer_step_post_hooks
        kept = list(hooks.items())
        hooks.clear()
        try:
            with limited_to(optimizer, wanted), without_global_step_hooks():
                if optimizer.param_groups:
                    optimizer.step()
        finally:
            hooks.update(kept)

    def _call_hooks(self) -> None:
        """Hooks after a step, once per update."""
        with without_global_step_hooks() as (before, after):
            for optimizer in self._optimizers:
                for hook in (*before, *optimizer._optimizer_step_post_hooks.values(), *after):
                    hook(optimizer, (), {})

    def _names(self, wanted: Collection[int]) -> list[str]:
        names = {id(p): name for name, p in self._model.named_parameters()}
        return [names.get(id(p), "one that is not in the model") for p in self._sums.parameters() if id(p) in wanted]

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise in place of one that comes in the middle: it says what has been updated."""
        if not (self._updated or (self._begun and self._is_distributed)):
            return error
        done = self._names(self._updated)
        blocks = [
            repr(block.path)
            for block in self._blocks
            if (own := [p for p in block.module.parameters() if p.requires_grad])
            and all(id(p) in self._updated for p in own)
        ]
        state = (
            f"{len(done)} of {len(self._sums.parameters())} parameters have been updated with this batch, and their "
            f"optimizer state: those of the blocks {', '.join(blocks) or '(none whole)'}, "
            "the last of them maybe in part. All others are as they were. "
            "This cannot be taken back: go on from a checkpoint."
        )
        logger.error("%s stopped an update='in_backward' halfway. %s", type(error).__name__, state)
        if is_out_of_memory(error) and not self._is_distributed:
            return torch.OutOfMemoryError(f"{error}\n{state}")
        return WindowError(f"{type(error).__name__}: {error}\n{state}") if isinstance(error, Exception) else error


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else grad._version


def _free(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
