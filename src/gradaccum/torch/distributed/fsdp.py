"""FSDP2 (`fully_shard`): hold its reduce-scatter back to the window's end, or let it free the memory at once."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum.on_torch.batch import leaves, map_leaves
from gradaccum.on_torch.buffers import as_found
from gradaccum.on_torch.private import (
    ShardedGroup,
    current_backward,
    finish_sharded_backward,
    gathering_nothing,
    own_sharded_groups,
    sharded_groups,
    start_over,
)
from gradaccum.torch.distributed.holders import release, take

__all__ = ["Shards", "is_sharded", "members_of", "sharded_modules"]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that `fully_shard` was applied to: the model itself, or each of its parts.

    Raises:
        RuntimeError: torch is too old for them.
    """
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
    if found and torch.__version__ < "2.13":
        raise RuntimeError(
            f"A model under fully_shard needs torch 2.13 or later, and this is {torch.__version__}, whose FSDP2 leaves "
            "out parameters that a pass doesn't use, and can't begin a pass again. Update torch, or use "
            "DistributedDataParallel."
        )
    return found


def members_of(modules: Sequence[nn.Module]) -> list[int]:
    """The ranks that share sharded modules."""
    return next(group for module in modules for group in sharded_groups(module)).mesh.mesh.flatten().tolist()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "to_local")


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


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
        on_pass: Called with the name of a sharded part whose forward pass begins, and with `""` at the end of all, in
            the first window and in micro-batches that some ranks repeat.
    """

    sharded = True
    """Whether all ranks must run the same passes."""
    finds_unused = False
    alone_now = asking_now = False
    """Of all, as another wrapper's may still watch the same model."""

    def __init__(
        self,
        modules: list[nn.Module],
        always: bool,
        on_forward: Callable[[], None],
        on_backward: Callable[[], None],
        on_pass: Callable[[str], None],
    ) -> None:
        self.modules: list[Any] = list(modules)
        self.always = always
        self.manual_reduce = False
        self._groups = [group for module in self.modules for group in sharded_groups(module)]
        mesh = self._groups[0].mesh
        self.members = members_of(self.modules)
        self.group: Any = mesh.get_group() if mesh.ndim == 1 else None
        self._mesh = mesh
        self._reduces = self._closes = False
        self._factor, self._idle = 1.0, False
        self._calls: list[Call] | None = None
        self._keeps = False
        self._backwards: set[int | None] = set()
        self._used: set[Tensor] = set()
        self._compares = self._first = True  # in the first window all passes are
        self.asks = False
        self.passes = 0
        """A number for the order in which sharded parts ran in this window."""
        take(self.modules, self)
        for module in self.modules:
            _reduce_unused(module, True)
        for group in self._groups:
            group.reduce_in_one_dtype()
        this_forward, this_backward = weakref.WeakMethod(on_forward), weakref.WeakMethod(on_backward)
        this_pass, this = weakref.WeakMethod(on_pass), weakref.ref(self)

        def backward_starts(gradient: Tensor) -> None:
            shards, tell = this(), this_backward()
            if shards is not None and tell is not None:
                tell()
                shards._backwards.add(current_backward())

        def arrives(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
            shards = this()
            if shards is None:
                return gradient
            if not shards._idle:
                shards._used.add(parameter)
            if shards._factor == 0.0:
                return torch.zeros_like(gradient)
            return gradient if shards._factor == 1.0 else gradient * shards._factor

        @torch.compiler.disable
        def forward_starts(name: str, number: int, module: Any, inputs: Any) -> None:
            shards, tell = this(), this_pass()
            if shards is None or Shards.alone_now or tell is None or not torch.is_grad_enabled():
                return
            shards.passes = (shards.passes * 31 + number) % 2**48
            if shards._compares and not Shards.asking_now:
                tell(name)

        @torch.compiler.disable
        def forward_done(module: Any, inputs: Any, keywords: Any, outputs: Any) -> None:
            shards, tell, tell_pass = this(), this_forward(), this_pass()
            if shards is None or Shards.alone_now or tell is None or not torch.is_grad_enabled():
                return
            if shards._keeps and shards._calls is not None:
                shards._calls.append(Call(module, inputs, keywords))
            if shards._compares and not Shards.asking_now and tell_pass is not None:
                tell_pass("")
            shards.watch(shards._groups)
            if shards._reduces:
                tell()
            for _, leaf in leaves(outputs):
                if _is_differentiable(leaf):
                    leaf.register_hook(backward_starts)

        self._arrives = arrives
        self._hooks = [module.register_forward_hook(forward_done, with_kwargs=True) for module in self.modules]
        parts = [(name, part) for module in self.modules for name, part in module.named_modules() if _is_part(part)]
        for number, (name, part) in enumerate(parts, start=1):
            starts = functools.partial(forward_starts, name, number)
            self._hooks.append(part.register_forward_pre_hook(starts, prepend=True))

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

    def scale(self, factor: float, idle: bool) -> None:
        """Multiply the gradients that arrive; 0 takes NaN and infinity away, too.

        The optimizer's parameters have no hooks that would run: autograd works on gathered ones.

        Args:
            factor: What to multiply with.
            idle: The pass runs for the other ranks' sake: what arrives is no gradient of this rank's.
        """
        self._factor, self._idle = factor, idle

    def ask_before(self, ask: Callable[[str], None] | None) -> None:
        """Call this before each gathering and each reduction, with its name; None: no more."""
        if self.asks or ask is not None:
            self.asks = Shards.asking_now = ask is not None
            for number, group in enumerate(self._groups):
                group.ask_before(ask, str(number))

    def start_over(self) -> None:
        """Forget the passes of this window: one of them failed, and no collective is under way."""
        start_over(self.modules)
        self.clear()

    def watch(self, groups: Iterable[ShardedGroup]) -> None:
        """These have been gathered: see which gradients arrive."""
        for group in groups:
            group.watch(self._arrives)

    @contextlib.contextmanager
    def in_turns(self) -> Iterator[list[ShardedGroup]]:
        """Passes inside gather nothing and reduce nothing: somebody else does so, with these groups."""
        self.start_over()
        with self.alone():
            yield self._groups

    @contextlib.contextmanager
    def alone(self) -> Iterator[dict[Tensor, torch.dtype]]:
        """Passes inside are this rank's alone, on whole parameters that somebody else puts into place.

        Yields:
            In which dtype parameters are gathered.
        """
        Shards.alone_now = True
        try:
            with contextlib.ExitStack() as stack:
                for module in self.modules:
                    stack.enter_context(gathering_nothing(module))
                yield {p: dtype for group in self._groups for p, dtype in group.gathered_dtypes().items()}
        finally:
            Shards.alone_now = False

    def gathered_bytes(self, gradients: int) -> int:
        """What gathered parameters and whole gradients take at most in a backward pass.

        Args:
            gradients: Bytes of all whole gradients in their parameters' dtype.
        """
        whole = sorted(group.gathered_bytes() for group in self._groups)
        if self.always:  # a group's, while the next one's are on their way
            return sum(gathered for gathered, _ in whole[-2:]) + 2 * max(reduced for _, reduced in whole)
        return sum(gathered for gathered, _ in whole) + max(sum(reduced for _, reduced in whole), gradients)

    def next_micro_batch(self) -> bool:
        """A micro-batch begins. Returns whether one like the last could be repeated: its passes have a known order."""
        backwards, self._backwards = self._backwards, set()
        self._compares = self._first
        return len(backwards) <= 1 and None not in backwards

    @property
    def repeats(self) -> bool:
        """Whether this rank's last micro-batch of the epoch is over."""
        return self._calls is not None

    def keep(self) -> None:
        """Keep the inputs of the forward passes that come, the epoch's last here, for `repeat`."""
        if self._calls is None:
            self._calls, self._keeps = [], True

    def compare(self) -> None:
        """Some rank repeats passes in this micro-batch: compare the ranks' passes as they come."""
        self._compares = True

    def forget(self) -> None:
        """An epoch begins."""
        self._calls, self._keeps = None, False

    def repeat(self) -> None:
        """Run the passes that were kept, with a gradient of zeros: buffers and random numbers stay as they are."""
        calls, self._keeps = self._calls or [], False
        self.scale(0.0, idle=True)
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
        for group in self._groups:
            group.add_zeros_to_reduce()
        with torch.no_grad():
            for module in self.modules:
                _reduce_unused(module, not self.always)  # there, the backward passes have done so
                finish_sharded_backward(module)
                _reduce_unused(module, True)
        self._set(self._closes)

    def prepare(self) -> None:
        """After a reduction."""

    def settle(self, source: int = 0) -> None:
        """After a window, in which this rank had rows."""
        self._factor, self._idle = 1.0, False
        self._compares = self._first = False
        self._used.clear()
        self.passes = 0

    def continues(self) -> None:
        """The window goes on after a reduction."""

    @property
    def filled(self) -> bool:
        """Whether zeros were reduced for a parameter that had no gradient on this rank in this window."""
        return bool(self.unused())

    def unused(self, groups: Collection[ShardedGroup] | None = None) -> list[int]:
        """The parameters, of all groups or of these, that had no gradient on this rank in this window, by number."""
        among = None if groups is None else {id(p) for group in groups for p in group.trained()}
        trained = enumerate(self._trained())
        return [i for i, p in trained if p not in self._used and (among is None or id(p) in among)]

    def drop(self, unused: Iterable[int]) -> None:
        """These parameters had no gradient on any rank."""
        parameters = self._trained()
        for index in unused:
            parameters[index].grad = None

    def restored(self, parameters: Iterable[Tensor]) -> None:
        """These parameters have a gradient in the window that came from a checkpoint: they count as used."""
        self._used.update(parameters)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group.trained()]

    def pending(self) -> list[Tensor]:
        """What an open window has added up that is not reduced yet."""
        return [tensor for group in self._groups for tensor in group.pending()]

    def clear(self) -> None:
        """Drop what an open window has added up."""
        for group in self._groups:
            group.clear()
        self._used.clear()
        self.passes = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks."""
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(tensor, group=self._mesh.get_group(dimension))
        return tensor

    def remove(self) -> None:
        """Leave the model as it was found, unless another optimizer has taken it."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            group.ignore()
        if release(self.modules, self):
            self._set(True)
            for module in self.modules:
                _reduce_unused(module, False)


def _is_part(module: nn.Module) -> bool:
    return next(own_sharded_groups(module), None) is not None


def _reduce_unused(module: Any, switch: bool) -> None:
    """Have FSDP2 reduce zeros for parameters without a gradient: other ranks may have one."""
    if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
        module.set_reduce_scatter_unused_params(switch)
