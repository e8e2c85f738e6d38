"""Updates in backward: each block's parameters as soon as their gradient is finished, which is then freed."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import format_bytes
from gradaccum.errors import WindowError
from gradaccum.on_torch.foreach import divide_, scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.memory import Gauge, is_out_of_memory, local_part
from gradaccum.on_torch.private import without_global_step_hooks
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.updates.ahead import Ahead
from gradaccum.torch.layers.updates.one_by_one import check_one_by_one, check_own_step, limited_to
from gradaccum.torch.layers.visits.files import in_file

__all__ = ["InTurn", "Turns", "Window", "turns"]

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


class Turns:
    """Is told whose gradients are complete. This one does nothing about it."""

    late: list[str]
    unlike: list[str]
    made: bool | None

    @property
    def looks_ahead(self) -> bool:
        """Whether backward runs twice, to look at all gradients before the first is used."""
        return False

    def open(self) -> None:
        """A window begins."""

    def begin(self, window: Window, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        """All losses are in."""

    def looked_at(self, place: int) -> None:
        """So are the gradients that wait for this block, in the first of two runs."""

    def goes_on(self) -> bool:
        """The first run is over. Returns whether there is a second."""
        return True

    def finished(self, place: int) -> None:
        """So are the gradients that wait for this block."""

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise in place of one that comes in the middle."""
        return error

    def close(self) -> None:
        """The window's passes are over."""


def turns(
    parameters: Iterable[Tensor], blocks: Sequence[Block], model: nn.Module, reached: Mapping[int, int]
) -> dict[int, list[Tensor]]:
    """After which block's turn each of these parameters has its gradient, by the block's place; -1 stands for all.

    Args:
        parameters: Those to be updated.
        blocks: The model's blocks.
        model: The model.
        reached: As for `InTurn.begin`.

    Example:
        >>> first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> model = nn.Sequential(first, second)
        >>> found = turns(model.parameters(), [Block("1", second)], model, {})
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


class InTurn(Turns):
    """The user's own optimizers, each of whose steps is made in parts: for one block after the other.

    Args:
        optimizers: The user's.
        sums: Their parameters' gradients.
        blocks: The model's blocks.
        model: The model.
        gauge: What memory there is.
        ahead: What it must know of all gradients before it uses the first.
        settle: Called with parameters that have just been updated; what it returns is dropped.
        several: Whether other ranks share the update, and must not begin it again once it has begun on any.

    Raises:
        ValueError: An optimizer doesn't treat parameters one by one, or has hooks that look at all gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        sums: GradientBuffer,
        blocks: Sequence[Block],
        model: nn.Module,
        gauge: Gauge,
        ahead: Ahead,
        settle: Callable[[list[Tensor]], object] = len,
        *,
        several: bool = False,
    ) -> None:
        self._settle, self._several = settle, several
        self._optimizers, self._sums, self._blocks = optimizers, sums, blocks
        self._model, self._gauge, self.ahead = model, gauge, ahead
        self._state_bytes: dict[int, list[float]] = {}
        self._due: dict[int, list[Tensor]] = {}
        self._updated, self._begun = set[int](), False
        self._divisor: Any = None
        self._empty = False
        self._rehearsal = False
        self._left_out: set[int] = set()
        self._complete: list[tuple[Tensor, Tensor | None, int]] = []
        self.grad_norm: Tensor | None = None
        """Of all gradients of the window, where it is looked ahead."""
        self.late: list[str] = []
        """Parameters, by name, whose gradient went on arriving in a rehearsal when they would have been updated."""
        self.unlike: list[str] = []
        """Blocks, by path, to which the second of two runs gave another gradient in a rehearsal."""
        self.made: bool | None = None
        """Whether the window that has just run has made its update; None before its first part."""

    def open(self) -> None:
        """A window begins: nothing of it has been updated."""
        self.made, self._updated, self._due, self._complete = None, set(), {}, []
        self._left_out, self._begun, self._empty = set(), False, False
        self.ahead.open()
        for optimizer in self._optimizers:
            if optimizer._optimizer_step_pre_hooks:
                raise ValueError(
                    f"{type(optimizer).__name__} has hooks of register_step_pre_hook, which look at all gradients, and "
                    "with update='in_backward' these are never there together. Use update='after_backward'."
                )
            check_own_step(optimizer)
            sizes = self._state_bytes.get(id(optimizer))
            if sizes is None or len(sizes) != len(optimizer.param_groups):
                self._state_bytes[id(optimizer)] = [*check_one_by_one(optimizer).values()]

    def begin(self, window: Window, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        """All losses are in, and the first block's turn comes: check what can be checked before it.

        Args:
            window: What they have added up to.
            reached: Of parameters outside of blocks' own calls, by id, after which block's turn their gradient is in.
            rehearsal: Update nothing, and look whether gradients are complete when they would be used.

        Raises:
            ValueError: The loss is not finite. Nothing has been updated.
            torch.OutOfMemoryError: There is no room for the optimizers' state. Nothing has been updated.
        """
        self._rehearsal, self._empty = rehearsal, False
        if not rehearsal:
            self._check(window)
        self._due = turns(self._sums.parameters(), self._blocks, self._model, reached)
        if self.looks_ahead:
            own = {id(p) for place in self._due if place >= 0 for p in self._due[place]}
            leaves = {*self._sums.parameters(), *self._model.parameters()}
            self.ahead.begin(leaves, {id(leaf) for leaf in leaves if id(leaf) not in own})

    @property
    def looks_ahead(self) -> bool:
        """Whether backward runs twice, to look at all gradients before the first is used."""
        return self.ahead.wanted and not self._empty

    def _check(self, window: Window) -> None:
        window.check()
        self._empty, self._divisor = window.empty, window.divisor
        if not self._empty and not self.ahead.scaled and not math.isfinite(loss := float(window.loss)):
            raise ValueError(
                f"The loss of this batch is {loss}. With update='in_backward' blocks would be updated before anybody "
                "could see all gradients, so nothing has been. Leave the batch out, or use update='after_backward'."
            )
        self._check_room()

    def _check_room(self) -> None:
        missing = 0.0
        for optimizer in self._optimizers:
            for group, bytes_ in zip(optimizer.param_groups, self._state_bytes[id(optimizer)], strict=True):
                here = [p for p in group["params"] if p.requires_grad and p.device == self._gauge.device]
                new = [p for p in here if p not in optimizer.state and not in_file(p)]
                missing += sum(local_part(p).numel() * min(bytes_, 4.0 * p.element_size()) for p in new)
        limit = self._gauge.limit() if missing else None
        if limit is not None and self._gauge.live() + missing > limit:
            raise torch.OutOfMemoryError(
                f"The optimizers' state needs {format_bytes(int(missing))}, and "
                f"{format_bytes(max(int(limit - self._gauge.live()), 0))} are free. Nothing has been updated. Use an "
                "optimizer with less state."
            )

    @torch.no_grad()
    def looked_at(self, place: int) -> None:
        """In the first of two runs: the gradients are complete that wait for this block, or for all (-1)."""
        parameters = self._due.get(place, [])
        if not self._rehearsal:
            self._divide(parameters)
        self.ahead.look(parameters, place)

    def goes_on(self) -> bool:
        """The first run is over. Returns whether there is a second; there is none where no optimizer is to step.

        Raises:
            WindowError: A gradient went on arriving when its block's turn was over.
            ValueError: The gradients are not finite, and no GradScaler waits for that. Nothing has been updated.
        """
        late = self.ahead.late()
        if late and not self._rehearsal:
            raise WindowError(
                f"{len(late)} parameters got a gradient after their block's turn, the first of shape "
                f"{tuple(late[0].shape)}: something else than their own block uses them, and no graph has shown it. "
                "Nothing has been updated."
            )
        self.late = self._names(set(map(id, late)))
        norm = self.ahead.close_first()
        if self._rehearsal:
            return True
        self.grad_norm, self._left_out = norm, self.ahead.overflown()
        if not self.ahead.scaled and not math.isfinite(number := float(norm)):
            raise ValueError(
                f"The norm of this batch's gradient is {number}, and nothing has been updated. Leave the batch out, or "
                "use update='after_backward'."
            )
        if all(id(optimizer) in self._left_out for optimizer in self._optimizers):
            self.ahead.give_back()
            self._free(self._sums.parameters())
            self.made = False
            self._call_hooks()
        return self.made is None

    @torch.no_grad()
    def finished(self, place: int) -> None:
        """The gradients are complete that wait for this block, or for what stands before all blocks (-1)."""
        parameters = self._due.pop(place, [])
        self._begun = not self._rehearsal
        self.ahead.give_back(parameters if place >= 0 else None)
        if self._rehearsal and self.looks_ahead and self.ahead.differs(parameters, place):
            self.unlike.append("what stands before the blocks" if place < 0 else self._blocks[place].path)
        if self._rehearsal:
            self._complete += [(p, g := p.grad, -1 if g is None else g._version) for p in parameters]
            if place < 0:
                moved = {id(p) for p, g, v in self._complete if p.grad is not g or (g is not None and g._version != v)}
                self.late += [name for name in self._names(moved) if name not in self.late]
            return
        if self._empty:
            self._free(parameters)
        else:
            self._update(parameters)
        if place >= 0:
            return
        late = [p for p in self._sums.parameters() if id(p) in self._updated and p.grad is not None]
        if late:
            raise WindowError(
                f"{len(late)} parameters got a gradient after their update, the first of shape {tuple(late[0].shape)}: "
                "something else than their own block uses them, and no graph has shown it."
            )
        self.made = not self._empty
        if self.made:
            self._call_hooks()

    def _call_hooks(self) -> None:
        """Once per update; of a fused optimizer, which a GradScaler steps to no effect after an overflow, then, too."""
        with without_global_step_hooks() as (before, after):
            for optimizer in self._optimizers:
                overflown = id(optimizer) in self._left_out
                if overflown and not getattr(optimizer, "_step_supports_amp_scaling", False):
                    continue
                if overflown:
                    self._step(optimizer, set())  # a schedule asks whether it was called
                own = list(optimizer._optimizer_step_post_hooks.values())
                for hook in (*before, *own, *after):
                    hook(optimizer, (), {})

    def _update(self, parameters: list[Tensor]) -> None:
        with_gradients = [p for p in parameters if p.grad is not None]
        if not with_gradients:
            return
        self._divide([p for p in with_gradients if not self.ahead.complete(p)])
        self.ahead.clip(with_gradients)
        with self._sums_of(with_gradients) as sums:
            sums.cast()
        wanted = {id(p) for p in with_gradients}
        self.made = False
        self._updated |= wanted
        for optimizer in self._optimizers:
            if id(optimizer) not in self._left_out:
                self._step(optimizer, wanted)
        self._settle(with_gradients)
        self._free(with_gradients)

    def _divide(self, parameters: Sequence[Tensor]) -> None:
        """Make sums the finished gradients, but for clipping."""
        with self._sums_of(parameters) as sums:
            if isinstance(self._divisor, Tensor):
                scale_(sums.gradients(), torch.where(self._divisor > 0, 1.0 / self._divisor, 0.0))
            elif self._divisor is not None:
                divide_(sums.gradients(), self._divisor)
        for optimizer in self._optimizers if self.ahead.scaled else ():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self.ahead.unscale([p for p in parameters if id(p) in own], optimizer)

    @contextlib.contextmanager
    def _sums_of(self, parameters: Sequence[Tensor]) -> Iterator[GradientBuffer]:
        """The sums of these parameters alone."""
        held = self._sums.parameters, self._sums.pending
        self._sums.parameters, self._sums.pending = lambda: [*parameters], list
        try:
            yield self._sums
        finally:
            self._sums.parameters, self._sums.pending = held

    def _step(self, optimizer: torch.optim.Optimizer, wanted: set[int]) -> None:
        hooks = optimizer._optimizer_step_post_hooks
        kept = list(hooks.items())
        hooks.clear()
        try:
            with limited_to(optimizer, wanted), without_global_step_hooks():
                if optimizer.param_groups or not wanted:
                    optimizer.step()
        finally:
            hooks.update(kept)

    def _free(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def _names(self, wanted: Collection[int]) -> list[str]:
        names = {id(p): name for name, p in self._model.named_parameters()}
        return [names.get(id(p), "one that is not in the model") for p in self._sums.parameters() if id(p) in wanted]

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise in place of one that comes in the middle: it says what state the model is in."""
        if not (self._updated or (self._begun and self._several)):
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
        if is_out_of_memory(error) and not self._several:
            return torch.OutOfMemoryError(f"{error}\n{state}")
        return WindowError(f"{type(error).__name__}: {error}\n{state}") if isinstance(error, Exception) else error

    def close(self) -> None:
        """The window's passes are over."""
        self.ahead.close()
