"""Optimizer steps in backward: a block's parameters are updated, and their gradients freed, as soon as it is done.

Whether an optimizer updates each parameter by itself is found out on a copy with small made-up parameters.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import format_bytes
from gradaccum.errors import WindowError
from gradaccum.on_torch.adapter.arrays import relative_error
from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.grad_buffer import GradientBuffer, WindowTotal
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory, local_part
from gradaccum.on_torch.private import without_global_step_hooks
from gradaccum.on_torch.stages import Stage, run_stages
from gradaccum.torch.layers.blocks import Block

logger = logging.getLogger("gradaccum")

LONGEST, UPDATES = 32, 3
"""A made-up parameter's longest dimension; how often they are updated."""


def parameters_by_block(
    parameters: Iterable[Tensor], blocks: Sequence[Block], model: nn.Module, reached: Mapping[int, int]
) -> dict[int, list[Tensor]]:
    """After which block's backward passes each parameter has its gradient, by the block's place; -1: after all.

    `reached`: of parameters outside of blocks' calls, by id, the block that finishes them.
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

    `stages` finish a block's gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        sums: GradientBuffer,
        blocks: Sequence[Block],
        model: nn.Module,
        meter: MemoryMeter,
        stages: Sequence[Stage],
    ) -> None:
        self._optimizers, self._sums, self._blocks = optimizers, sums, blocks
        self._model, self._meter, self._stages = model, meter, stages
        self._state_bytes: dict[int, list[float]] = {}
        self.late: list[str] = []
        """Parameters, by name, whose gradient went on arriving in a rehearsal when they would have been updated."""
        self.open()

    def open(self) -> None:
        """A window begins."""
        self.made: bool | None = None
        """Whether it has made its update; None before its first part."""
        self._updated, self._rehearsal, self._empty = set[int](), False, False
        self._due: dict[int, list[Tensor]] = {}
        self._divisor: Any = None
        self._seen: list[tuple[Tensor, Tensor | None, int]] = []
        for optimizer in self._optimizers:
            if optimizer._optimizer_step_pre_hooks:
                raise ValueError(
                    f"{type(optimizer).__name__} has hooks of register_step_pre_hook, which see all gradients, but "
                    "update='in_backward' never has all of them at once. Use update='after_backward'."
                )
            check_own_step(optimizer)
            sizes = self._state_bytes.get(id(optimizer))
            if sizes is None or len(sizes) != len(optimizer.param_groups):
                self._state_bytes[id(optimizer)] = check_per_parameter(optimizer)

    def begin(self, window: Any, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        """All losses are in, and the last block's turn comes: check what can be checked before any update.

        A rehearsal updates nothing, and looks whether gradients are finished when it would.
        """
        self._rehearsal = rehearsal
        if not rehearsal:
            window.check()
            self._empty, self._divisor = window.empty, window.divisor
            if not self._empty and not math.isfinite(loss := float(window.loss)):
                raise ValueError(
                    f"The loss of this batch is {loss}. update='in_backward' would update blocks before all gradients "
                    "are known, so nothing has been updated. Leave the batch out, or use update='after_backward'."
                )
            self._check_room()
        self._due = parameters_by_block(self._sums.parameters(), self._blocks, self._model, reached)

    def _check_room(self) -> None:
        missing = 0.0
        for optimizer in self._optimizers:
            for group, bytes_ in zip(optimizer.param_groups, self._state_bytes[id(optimizer)], strict=True):
                here = [p for p in group["params"] if p.requires_grad and p.device == self._meter.device]
                new = [p for p in here if p not in optimizer.state]
                missing += sum(local_part(p).numel() * min(bytes_, 4.0 * p.element_size()) for p in new)
        limit = self._meter.limit() if missing else None
        if limit is not None and (free := limit - self._meter.live()) < missing:
            raise torch.OutOfMemoryError(
                f"The optimizers' state needs {format_bytes(int(missing))}, and {format_bytes(max(int(free), 0))} are "
                "free. Nothing has been updated. Use an optimizer with less state."
            )

    @torch.no_grad()
    def finished(self, place: int) -> None:
        """The gradients are finished that wait for this block, or for what stands before all blocks (-1)."""
        parameters = self._due.pop(place, [])
        if self._rehearsal:
            self._rehearse(parameters, last=place < 0)
            return
        if not self._empty:
            self._update([p for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        if place < 0:
            late = [p for p in self._sums.parameters() if id(p) in self._updated and p.grad is not None]
            if late:
                raise WindowError(
                    f"{len(late)} parameters got a gradient after their update, the first of shape "
                    f"{tuple(late[0].shape)}: another module than their own block uses them, in a way that its graph "
                    "doesn't show. Leave that block out of `blocks`, or use update='after_backward'."
                )
            self.made = not self._empty
            if self.made:
                self._call_hooks()

    def _rehearse(self, parameters: list[Tensor], *, last: bool) -> None:
        """Note gradients as they are when they would be used; at the last, which of them went on arriving."""
        self._seen += [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
        if last:
            moved = {id(p) for p, g, then in self._seen if p.grad is not g or (g is not None and g._version != then)}
            self.late = self._names(moved)

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
        """The error to raise in place of one that comes in the middle: it names what has been updated."""
        if not self._updated:
            return error
        trained = [(b.path, [p for p in b.module.parameters() if p.requires_grad]) for b in self._blocks]
        blocks = [repr(path) for path, inside in trained if inside and all(id(p) in self._updated for p in inside)]
        state = (
            f"{len(self._updated)} of {len(self._sums.parameters())} parameters have been updated with this batch, and "
            f"their optimizer state: those of the blocks {', '.join(blocks) or '(none whole)'}, the last of them maybe "
            "in part. All others are as they were. This cannot be undone: continue from a checkpoint."
        )
        logger.error("%s stopped an update='in_backward' halfway. %s", type(error).__name__, state)
        if is_out_of_memory(error):
            return torch.OutOfMemoryError(f"{error}\n{state}")
        return WindowError(f"{type(error).__name__}: {error}\n{state}") if isinstance(error, Exception) else error


@contextlib.contextmanager
def limited_to(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> Iterator[None]:
    """The optimizer has these parameters alone, by id, meanwhile, in groups that are the same objects."""
    groups = optimizer.param_groups
    usual = [(group, group["params"]) for group in groups]
    for group, listed in usual:
        group["params"] = [p for p in listed if id(p) in parameters]
    groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, listed in usual:
            group["params"] = listed
        groups[:] = [group for group, _ in usual]


def check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise if somebody has put another function in the place of the optimizer's `step`; schedulers wrap it."""
    step, usual = vars(optimizer).get("step"), type(optimizer).step
    while getattr(step, "__globals__", {}).get("__name__") == torch.optim.lr_scheduler.__name__:
        step = step.__wrapped__  # type: ignore[union-attr]
    if step is not None and getattr(step, "__func__", step) is not usual:
        raise ValueError(
            f"{type(optimizer).__name__}'s step was replaced by {getattr(step, '__name__', step)}, and "
            "update='in_backward' calls it several times in an update. Put what must happen once per update into "
            "register_step_post_hook, or use update='after_backward'."
        )


def check_per_parameter(optimizer: torch.optim.Optimizer) -> list[float]:
    """Raise if what the optimizer does to a parameter depends on others, or on how often it steps, or it does more.

    Returns the bytes of state per number of a parameter, for each group.
    """
    name = type(optimizer).__name__
    try:
        at_once, alone = (_trained(optimizer, one_by_one=one_by_one) for one_by_one in (False, True))
    except Exception as error:
        raise ValueError(
            f"update='in_backward' needs an optimizer that treats parameters one by one, and {name} could not be "
            f"tested: a copy of it can't be stepped with small parameters ({type(error).__name__}: {error}). Use "
            "update='after_backward'."
        ) from error
    pairs = itertools.zip_longest(_everything(at_once), _everything(alone))
    if any(x is not y and (x is None or y is None or _differ(x, y)) for x, y in pairs):
        raise ValueError(
            f"{name} makes a different update when it steps parameters one by one: a parameter's update depends on the "
            "others, or steps are counted for all of them together. update='in_backward' would be inexact. Use "
            "update='after_backward', or an optimizer that treats each parameter by itself."
        )
    more = _done_without_parameters(optimizer)
    if more is not None:
        raise ValueError(
            f"{name}.step() does more than update its parameters: it calls {more} even when it has none to update. "
            "update='in_backward' would do that several times in an update. Put what must happen once per update into "
            "register_step_post_hook, or use update='after_backward'."
        )

    def bytes_of_state(p: Tensor) -> float:
        sizes = [leaf.nbytes for _, leaf in leaves(at_once.state.get(p, {})) if isinstance(leaf, Tensor)]
        return sum(sizes) / p.numel()

    return [max(map(bytes_of_state, group["params"]), default=0.0) for group in at_once.param_groups]


class _FoundMore(BaseException):  # no error, and nothing that a step would catch
    """An operation."""


class _Refusing(TorchDispatchMode):
    """Lets no operation happen but the profiler's marks around a step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            raise _FoundMore(func)
        return func(*args, **(kwargs or {}))


def _done_without_parameters(optimizer: torch.optim.Optimizer) -> str | None:
    """The first operation of a step that has no parameters, or None."""
    small = _in_small(optimizer)
    try:
        with limited_to(small, set()), without_global_step_hooks(), _Refusing():
            small.step()
    except _FoundMore as operation:
        return str(operation.args[0])
    except Exception:
        return None  # a step that wants parameters gets some
    return None


def _trained(optimizer: torch.optim.Optimizer, *, one_by_one: bool) -> torch.optim.Optimizer:
    """A copy of the optimizer, after some updates of small parameters."""
    small = _in_small(optimizer)
    parameters = [p for group in small.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(0)
    with without_global_step_hooks():
        for update in range(UPDATES):
            for p in parameters:
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 100.0 ** (1 - update)
                p.grad = grad.to(p.device, p.dtype)
            for wanted in [{id(p)} for p in reversed(parameters)] if one_by_one else [set(map(id, parameters))]:
                with limited_to(small, wanted):
                    small.step()
    return small


def _in_small(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with a few small parameters in place of its own, and without state and hooks."""
    generator, memo, groups = torch.Generator().manual_seed(1), dict[int, Any](), list[dict[str, Any]]()
    for group in optimizer.param_groups:
        # Of each shape two, so that those of the same shape meet.
        kinds = {(tuple(min(n, LONGEST) for n in p.shape), p.dtype, p.device): p for p in group["params"] if p.numel()}
        made = [nn.Parameter(_random(p, shape, generator)) for (shape, *_), p in kinds.items() for _ in range(2)]
        groups.append({"params": made, **copy.deepcopy({k: v for k, v in group.items() if k != "params"}, memo)})
        if isinstance(groups[-1].get("lr"), (int, float)):
            groups[-1]["lr"] = 0.1  # which a schedule may have set to 0
    small: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo.update({id(p): p for group in optimizer.param_groups for p in group["params"]})  # never copied
    for key, value in vars(optimizer).items():
        if key not in {"param_groups", "state", "step"}:
            vars(small)[key] = type(value)() if key.endswith("_hooks") else copy.deepcopy(value, memo)
    small.param_groups, small.state = groups, defaultdict(dict)
    return small


def _random(like: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    dtype = torch.float64 if like.dtype.is_floating_point else like.dtype
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device, dtype)


def _everything(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All numbers of an optimizer: its own, its groups', its parameters and their state."""
    trees: list[Any] = [{key: value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")}]
    for group in optimizer.param_groups:
        trees.append({key: value for key, value in group.items() if key != "params"})
        trees += [(p.detach(), optimizer.state.get(p, {})) for p in group["params"]]
    return [leaf for _, leaf in leaves(trees) if isinstance(leaf, (Tensor, float, int))]


def _differ(x: Any, y: Any) -> bool:
    """By more than rounding."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    dtype = x.dtype if x.is_floating_point() else torch.float64
    return x.shape != y.shape or bool(relative_error(x.double(), y.double()) > rounding(str(dtype), x.device.type))
