"""FSDP2 (`fully_shard`): hold its reduce-scatter back to the window's end, or let it free the memory at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum.on_torch.batch import leaves, map_leaves
from gradaccum.on_torch.private import ShardedGroup, current_backward, finish_sharded_backward, sharded_groups
from gradaccum.on_torch.transaction import as_found

__all__ = ["Shards", "is_sharded", "sharded_modules"]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that `fully_shard` was applied to: the model itself, or each of its parts."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule  # takes a second to import, and few need it

    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            found.append(module)
            return
        for child in module.children():
            look(child)

    look(model)
    return found


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "to_local")


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Weighed(torch.autograd.Function):
    """The tensor itself; its gradient goes through a function."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, times: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.times = times
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.times(gradients[0]), None


class Call:
    """One forward pass, to be made again: without the graph that its inputs came from."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._module = module
        self._inputs, self._keywords = map_leaves(_detached, inputs), map_leaves(_detached, keywords)
        self._device = next(module.parameters()).device.type
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

    def __call__(self) -> Any:
        enabled, dtype = self._autocast
        with torch.autocast(self._device, dtype, enabled=enabled):
            return self._module(*self._inputs, **self._keywords)


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class Shards:
    """The sharded parts of a model.

    FSDP2 looks at its flags in the backward pass. In an open window with `always=False` it adds up whole gradients, one
    copy of the model's size on each rank, sends nothing, and keeps parameters gathered from one backward pass to the
    next forward pass. With `always=True` it reduces on every micro-batch (with HSDP within the shard group only) and
    keeps the shard's gradient alone.

    Every forward and backward pass gathers parameters, so all ranks must run the same passes. One that has no
    micro-batch left runs its last forward pass again, and a backward pass of zeros.

    Args:
        modules: What `sharded_modules` found.
        always: Reduce on every micro-batch.
        on_forward: Called when a forward pass of a micro-batch that closes the window is done.
        on_backward: Called when a backward pass starts.
    """

    in_step = True
    """Whether all ranks must run the same passes."""

    def __init__(
        self,
        modules: list[nn.Module],
        always: bool,
        on_forward: Callable[[], None],
        on_backward: Callable[[], None],
    ) -> None:
        self.modules: list[Any] = list(modules)
        self.always = always
        self.by_hand = False
        mesh = next(self._groups()).mesh
        self.members: list[int] = mesh.mesh.flatten().tolist()
        self.group: Any = mesh.get_group() if mesh.ndim == 1 else None
        self._mesh = mesh
        self._reduces = self._closes = False
        self._factor = 1.0
        self._calls: list[Call] | None = None
        self._keeps = False
        self._backwards: set[int | None] = set()
        this_forward, this_backward = weakref.WeakMethod(on_forward), weakref.WeakMethod(on_backward)
        this = weakref.ref(self)

        def backward_starts(gradient: Tensor) -> Tensor | None:
            shards, tell = this(), this_backward()
            if shards is None or tell is None:
                return None
            tell()
            shards._backwards.add(current_backward())
            return None if shards._factor else torch.zeros_like(gradient)

        def times(gradient: Tensor) -> Tensor:
            shards = this()
            if shards is None or shards._factor == 1.0:
                return gradient
            if shards._factor and len(shards.modules) > 1:
                raise ValueError(
                    "Several sharded models, and micro-batches of different weights: loss.backward() cannot say what "
                    "it weighs. Use optimizer.backward(loss)."
                )
            return gradient * shards._factor

        @torch.compiler.disable
        def forward_done(module: Any, inputs: Any, keywords: Any, outputs: Any) -> Any:
            shards, tell = this(), this_forward()
            if shards is None or tell is None or not torch.is_grad_enabled():
                return None
            if shards._keeps and shards._calls is not None:
                shards._calls.append(Call(module, inputs, keywords))
            if shards._reduces:
                tell()
            for _, leaf in leaves(outputs):
                if _is_differentiable(leaf):
                    leaf.register_hook(backward_starts)
            if shards._factor in (0.0, 1.0):
                return None
            # Not a hook: the model may have made one of its outputs from another, whose gradient it would meet twice.
            return map_leaves(lambda leaf: _Weighed.apply(leaf, times) if _is_differentiable(leaf) else leaf, outputs)

        self._hooks = [module.register_forward_hook(forward_done, with_kwargs=True) for module in self.modules]

    def _groups(self) -> Iterator[ShardedGroup]:
        for module in self.modules:
            yield from sharded_groups(module)

    def hold(self, closes: bool, reduces: bool = False) -> None:
        """Whether the next backward pass closes the window, or reduces it."""
        self._reduces, self._closes = closes or reduces, closes
        self._set(closes)

    def _set(self, closes: bool) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(closes or self.always)
            if self.always:
                module.set_requires_all_reduce(closes)  # HSDP's second reduction
            module.set_is_last_backward(closes)
            module.set_reshard_after_backward(closes or self.always)

    def scale(self, factor: float) -> None:
        """Multiply what arrives at the model's outputs in the backward pass.

        The parameters' own hooks never run: autograd works on gathered ones.
        """
        self._factor = factor

    def next_micro_batch(self) -> bool:
        """A micro-batch begins. Returns whether one like the last could be repeated: its passes have a known order."""
        backwards, self._backwards = self._backwards, set()
        return len(backwards) <= 1 and None not in backwards

    def keep(self) -> None:
        """Keep the inputs of the forward passes that come, the epoch's last here, for `repeat`."""
        if self._calls is None:
            self._calls, self._keeps = [], True

    def forget(self) -> None:
        """An epoch begins."""
        self._calls, self._keeps = None, False

    def repeat(self) -> None:
        """Run the passes that were kept, with a gradient of zeros: buffers and random numbers stay as they are."""
        calls, self._keeps = self._calls or [], False
        everything = [part for module in self.modules for part in module.modules()]
        with as_found(everything, next(self.modules[0].parameters()).device):
            with torch.enable_grad():
                outputs = [leaf for call in calls for _, leaf in leaves(call()) if _is_differentiable(leaf)]
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])

    def starts(self) -> None:
        """The backward pass that reduces has started."""

    def reduce(self) -> None:
        """Reduce what the window has added up, outside of a backward pass. All ranks take part."""
        self._set(True)
        for group in self._groups():
            group.add_zeros_to_reduce()
        with torch.no_grad():
            for module in self.modules:
                finish_sharded_backward(module)
        self._set(self._closes)

    def settle(self) -> None:
        """After a window."""
        self._factor = 1.0

    def pending(self) -> list[Tensor]:
        """What an open window has added up that is not reduced yet."""
        return [tensor for group in self._groups() for tensor in group.pending()]

    def clear(self) -> None:
        """Drop what an open window has added up."""
        for group in self._groups():
            group.clear()

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks."""
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(tensor, group=self._mesh.get_group(dimension))
        return tensor

    def remove(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()
        self._set(True)
