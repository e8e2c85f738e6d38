"""FSDP2 (`fully_shard`): hold its reduce-scatter back to the window's end, or let it free the memory at once."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.private import (
    ShardedGroup,
    finish_sharded_backward,
    gathering_nothing,
    own_sharded_groups,
    sharded_groups,
    start_over,
)
from gradaccum.torch.distributed.owners import release, take, weakly

__all__ = ["Shards", "is_sharded", "members_of", "sharded_modules"]


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


class Passes(Protocol):
    """What is called when a model's passes begin and end."""

    def forward_starts(self, part: str) -> None:
        """In the first window: a sharded part's forward pass begins; `""`: all have."""

    def forward_done(self) -> None:
        """A forward pass of a micro-batch that closes the window is done."""

    def backward_starts(self) -> None:
        """A backward pass starts."""


class Shards:
    """The sharded parts of a model.

    FSDP2 looks at its flags in the backward pass. In an open window with `always=False` it adds up whole gradients, one
    copy of the model's size on each rank, sends nothing, and keeps parameters gathered from one backward pass to the
    next forward pass. With `always=True` it reduces on every micro-batch (with HSDP within the shard group only) and
    keeps the shard's gradient alone.

    Every forward and backward pass gathers parameters, so all ranks must run the same passes.
    """

    sharded = True
    """Whether all ranks must run the same passes."""
    finds_unused = manual_reduce = False
    alone_now = asking_now = False
    """Of all, as another wrapper's may still watch the same model."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], always: bool) -> None:
        self.modules: list[Any] = list(modules)
        self.always = always
        self._groups = [group for module in self.modules for group in sharded_groups(module)]
        self._mesh = self._groups[0].mesh
        self.members = members_of(self.modules)
        self.group: Any = self._mesh.get_group() if self._mesh.ndim == 1 else None
        self._optimized = set(parameters)
        self._reduces = self._closes = False
        self._factor, self._idle = 1.0, False
        self._used: set[Tensor] = set()
        self._first = True  # in the first window, the ranks' passes are compared as they come
        self.asks = False
        self.passes = 0
        """A number for the order in which sharded parts ran in this window."""
        self._hooks: list[Any] = []

    def attach(self, passes: Passes) -> None:
        """Take the modules, and tell this object of their passes. It is not kept alive."""
        self._passes = weakref.ref(passes)
        if self._shares_model():
            gc.collect()  # it may be gone, but for a cycle
            if self._shares_model():
                release(self.modules, self)
                raise ValueError(
                    "Another wrapped optimizer has other parameters of this sharded model (fully_shard), and would "
                    "have them reduced in the middle of its windows. Shard their parts by themselves, and pass each "
                    "optimizer its own: Optimizer(..., model=model.generator); or use DistributedDataParallel, under "
                    "which several optimizers may share a model."
                )
        for module in self.modules:
            _reduce_unused(module, True)
        for group in self._groups:
            group.reduce_in_one_dtype()
        done = torch.compiler.disable(weakly(self._forward_done))
        self._hooks += [module.register_forward_hook(done) for module in self.modules]
        parts = [(name, part) for module in self.modules for name, part in module.named_modules() if _is_part(part)]
        for number, (name, part) in enumerate(parts, start=1):
            self._hooks.append(part.register_forward_pre_hook(self._starting(name, number), prepend=True))

    def _shares_model(self) -> bool:
        others = (other for other in take(self.modules, self) if isinstance(other, Shards))
        return any(other._optimized.isdisjoint(self._optimized) for other in others)

    def _starting(self, name: str, number: int) -> Callable[..., None]:
        return torch.compiler.disable(weakly(lambda shards, *_: shards._forward_starts(name, number), self))

    def _watched_passes(self) -> Passes | None:
        """Where a pass is to be told; None where it isn't one of a window."""
        return None if Shards.alone_now or not torch.is_grad_enabled() else self._passes()

    def _forward_starts(self, name: str, number: int) -> None:
        if (passes := self._watched_passes()) is not None:
            self.passes = (self.passes * 31 + number) % 2**48
            if self._first and not Shards.asking_now:
                passes.forward_starts(name)

    def _forward_done(self, module: Any, inputs: Any, outputs: Any) -> None:
        if (passes := self._watched_passes()) is None:
            return
        if self._first and not Shards.asking_now:
            passes.forward_starts("")
        self.watch(self._groups)
        if self._reduces:
            passes.forward_done()
        starts = weakly(self._backward_starts)
        for _, leaf in leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(starts)

    def _backward_starts(self, gradient: Tensor) -> None:
        if (passes := self._passes()) is not None:
            passes.backward_starts()

    def _arrives(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if not self._idle:
            self._used.add(parameter)
        if self._factor == 0.0:
            return torch.zeros_like(gradient)
        return gradient if self._factor == 1.0 else gradient * self._factor

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

    def scale(self, factor: float, idle: bool = False) -> None:
        """Multiply the gradients that arrive; 0 takes NaN and infinity away, too.

        The optimizer's parameters have no hooks that would run: autograd works on gathered ones. `idle`: the pass runs
        for the other ranks' sake, and what arrives is no gradient of this rank's.
        """
        self._factor, self._idle = factor, idle

    def scale_more(self, factor: float) -> None:
        """Multiply them with this, too."""
        self._factor *= factor

    def ask_before(self, ask: Callable[[str], object] | None) -> None:
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
        arrives = weakly(self._arrives)
        for group in groups:
            group.watch(arrives)

    @contextlib.contextmanager
    def in_turns(self) -> Iterator[list[ShardedGroup]]:
        """Passes inside gather nothing and reduce nothing: somebody else does so, with these groups."""
        self.start_over()
        with self.alone():
            yield self._groups

    @contextlib.contextmanager
    def alone(self) -> Iterator[dict[Tensor, torch.dtype]]:
        """Passes inside are this rank's alone, on whole parameters that somebody else puts into place.

        Yields in which dtype parameters are gathered.
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

        `gradients`: bytes of all whole gradients in their parameters' dtype.
        """
        whole = sorted(group.gathered_bytes() for group in self._groups)
        if self.always:  # a group's, while the next one's are on their way
            return sum(gathered for gathered, _ in whole[-2:]) + 2 * max(reduced for _, reduced in whole)
        return sum(gathered for gathered, _ in whole) + max(sum(reduced for _, reduced in whole), gradients)

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
        self._first = False
        self._used.clear()
        self.passes = 0

    def continues(self) -> None:
        """The window goes on after a reduction."""

    @property
    def filled(self) -> bool:
        """Whether zeros were reduced for a parameter that had no gradient on this rank in this window."""
        return bool(self.unused())

    @property
    def will_fill(self) -> bool:
        """The same, after a `reduce` that is to come."""
        return self.filled

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
