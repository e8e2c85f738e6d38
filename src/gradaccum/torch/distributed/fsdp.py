"""FSDP2 (`fully_shard`): hold its reduce-scatter back to the window's end, or let it free the memory at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

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
from gradaccum.torch.distributed.engine import Engine, weakly

__all__ = ["Shards", "is_sharded", "members_of", "sharded_modules"]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that `fully_shard` was applied to: the model itself, or each of its parts."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule  # takes a second to import, and few need it

    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, FSDPModule):
            found.append(module)
        else:
            waiting += reversed([*module.children()])
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


class Shards(Engine):
    """The sharded parts of a model.

    FSDP2 looks at its flags in the backward pass. In an open window with `always=False` it adds up whole gradients, one
    copy of the model's size on each rank, sends nothing, and keeps parameters gathered from one backward pass to the
    next forward pass. With `always=True` it reduces on every micro-batch (with HSDP within the shard group only) and
    keeps the shard's gradient alone.

    Every forward and backward pass gathers parameters, so all ranks must run the same passes.
    """

    sharded = True
    alone_now = asking_now = False
    """Of all, as another wrapper's may still watch the same model."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], always: bool) -> None:
        super().__init__(modules, parameters)
        self.always = always
        self._groups = [group for module in self.modules for group in sharded_groups(module)]
        self._mesh = self._groups[0].mesh
        self.members = members_of(self.modules)
        self.group = self._mesh.get_group() if self._mesh.ndim == 1 else None
        self._reduces = self._closes = False
        self.factor, self._idle = 1.0, False
        """What gradients are multiplied with as they arrive."""
        self._first = True  # in the first window, the ranks' passes are compared as they come
        self.asks = False

    def attach(self, ranks: Any) -> None:
        super().attach(ranks)
        if self._take():
            gc.collect()  # it may be gone, but for a cycle
            if self._take():
                self._release()
                raise ValueError(
                    "Another wrapped optimizer has other parameters of this sharded model (fully_shard), and would "
                    "have them reduced in the middle of its windows. Shard their parts by themselves, and pass each "
                    "optimizer its own: Optimizer(..., model=model.generator); or use DistributedDataParallel, under "
                    "which several optimizers may share a model."
                )
        for module in self.modules:
            module.set_reduce_scatter_unused_params(True)  # other ranks may have a gradient where this one has none
        for group in self._groups:
            group.reduce_in_one_dtype()
        done = torch.compiler.disable(weakly(self._forward_done))
        self._hooks += [module.register_forward_hook(done) for module in self.modules]
        named = [(name, part) for module in self.modules for name, part in module.named_modules()]
        parts = [(name, part) for name, part in named if next(own_sharded_groups(part), None) is not None]
        for number, (name, part) in enumerate(parts, start=1):
            self._hooks.append(part.register_forward_pre_hook(self._starting(name, number), prepend=True))

    def remove(self) -> None:
        super().remove()
        for group in self._groups:
            group.ignore()
        if self._release():
            self._set(True)
            for module in self.modules:
                module.set_reduce_scatter_unused_params(False)

    # Passes.

    def _starting(self, name: str, number: int) -> Callable[..., None]:
        return torch.compiler.disable(weakly(lambda shards, *_: shards._forward_starts(name, number), self))

    def _watching(self) -> Any:
        """The ranks that are to hear of a pass; None where it isn't one of a window."""
        return None if Shards.alone_now or not torch.is_grad_enabled() else self._ranks()

    def _forward_starts(self, name: str, number: int) -> None:
        if (ranks := self._watching()) is not None:
            self.passes = (self.passes * 31 + number) % 2**48
            if self._first and not Shards.asking_now:
                ranks.together.meet(name)

    def _forward_done(self, module: Any, inputs: Any, outputs: Any) -> None:
        if (ranks := self._watching()) is None:
            return
        if self._first and not Shards.asking_now:
            ranks.together.meet("")
        self.watch(self._groups)
        if self._reduces:
            ranks.forward_done()
        starts = weakly(lambda shards, gradient: shards._backward_starts(), self)
        for _, leaf in leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(starts)

    def _backward_starts(self) -> None:
        if (ranks := self._ranks()) is not None:
            ranks.backward_starts()

    def watch(self, groups: Iterable[ShardedGroup]) -> None:
        """These have been gathered: see which gradients arrive."""
        arrives = weakly(self._arrives)
        for group in groups:
            group.watch(arrives)

    def _arrives(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if not self._idle:
            self._used.add(parameter)
        if self.factor == 0.0:
            return torch.zeros_like(gradient)  # NaN and infinity go, too
        return gradient if self.factor == 1.0 else gradient * self.factor

    def scale(self, factor: float, idle: bool = False) -> None:
        # The optimizer's parameters have no hooks that would run: autograd works on gathered ones.
        self.factor, self._idle = factor, idle

    def hold(self, closes: bool, reduces: bool = False) -> None:
        self._reduces, self._closes = closes or reduces, closes
        self._set(closes)

    def _set(self, closes: bool) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(closes or self.always)
            if self.always:
                module.set_requires_all_reduce(closes)  # HSDP's second reduction
            module.set_is_last_backward(closes)
            module.set_reshard_after_backward(closes or self.always)

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

    # The window's sum.

    def reduce(self) -> None:
        self._set(True)
        for group in self._groups:
            group.add_zeros_to_reduce()
        with torch.no_grad():
            for module in self.modules:
                module.set_reduce_scatter_unused_params(not self.always)  # there, the backward passes have done so
                finish_sharded_backward(module)
                module.set_reduce_scatter_unused_params(True)
        self._set(self._closes)

    def settle(self, source: int = 0) -> None:
        self.factor, self._idle, self._first = 1.0, False, False
        self._used.clear()
        self.passes = 0

    def pending(self) -> list[Tensor]:
        return [tensor for group in self._groups for tensor in group.pending()]

    def clear(self) -> None:
        for group in self._groups:
            group.clear()
        self._used.clear()
        self.passes = 0

    def restored(self, parameters: Iterable[Tensor]) -> None:
        self._used.update(parameters)

    def sum(self, tensor: Tensor) -> Tensor:
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(tensor, group=self._mesh.get_group(dimension))
        return tensor

    # Parameters that no rank has used.

    def trained(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group.trained()]

    @property
    def filled(self) -> bool:
        return bool(self.unused())

    def unused_among(self, groups: Collection[ShardedGroup]) -> list[int]:
        """As `unused`, of the parameters of these groups."""
        among = {id(parameter) for group in groups for parameter in group.trained()}
        trained = self.trained()
        return [i for i in self.unused() if id(trained[i]) in among]
