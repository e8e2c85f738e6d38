"""FSDP2 (`fully_shard`): hold its reduce-scatter back to the window's end, or let it free the memory at once.

A sharded model gathers parameters in each pass, and every rank waits there for every other. So before each collective
of the model the ranks exchange a message over a process group of their own: "I am about to begin this one", or "memory
ran out here". No rank begins a collective that not all others are about to begin:

- All of them have exchanged the same messages so far, each of which named the same collective on all ranks. Those
  collectives have been begun by all, and so they end.
- From there each rank comes to its next message, whatever happens in between: to the next collective, to the end of its
  passes, to an error. None waits in a collective in the meantime, so none misses the others' messages.
- Where memory ran out on some, all learn it from the same message, leave their pass, forget the window's passes, and
  begin again in smaller micro-batches. Another error leaves a message, too, and is an error on every rank.

Collectives that the model makes by itself, beside FSDP2's, are not asked for.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum.core.sizes import Plan, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow, nothing_fits
from gradaccum.on_torch.private import (
    ShardedGroup,
    finish_sharded_backward,
    gathering_nothing,
    own_sharded_groups,
    sharded_groups,
    start_over,
)
from gradaccum.torch.distributed.engine import Engine, weakly

logger = logging.getLogger("gradaccum")

DIFFERENT_PASSES = (
    "A sharded model needs the same passes on every rank, and the ranks ran different parts of it, perhaps because the "
    "batch chooses a head. Nothing was updated. Give all ranks batches of the same kind and number, or shard such "
    "parts together with the whole model."
)

_AGAIN, _FINAL = 1, 2
"""In a message: memory ran out; smaller micro-batches may do, or nothing will."""


class RankOutOfMemory(Exception):  # no error of its own: all ranks hear of one's at once
    """Memory ran out on some ranks, in passes that all of them run together.

    `costs`: by rank, the rows or tokens of the micro-batch that did not fit; `final`: nothing smaller can be tried.
    """

    def __init__(self, costs: Mapping[int, int], final: bool) -> None:
        self.costs, self.final = dict(costs), final
        self.ranks = f"rank{'s' * (len(costs) > 1)} {', '.join(map(str, sorted(costs)))}"
        super().__init__(f"Memory ran out on {self.ranks}.")


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that `fully_shard` was applied to: the model itself, or each of its parts."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule  # takes a second to import, and few need it

    found: list[nn.Module] = []
    for module in model.modules():  # outer ones come first
        if isinstance(module, FSDPModule) and not any(module in {*outer.modules()} for outer in found):
            found.append(module)
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

    Every forward and backward pass gathers parameters, so all ranks must run the same passes. In the first window they
    compare them as they come; in a large batch's passes they ask each other before each collective.
    """

    sharded = True
    alone_now = asking_now = False
    """Of all, as another wrapper's may still watch the same model."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Callable[[], Iterable[Tensor]], always: bool) -> None:
        super().__init__(modules, parameters)
        self.always = always
        self.groups = [group for module in self.modules for group in sharded_groups(module)]
        self._mesh = self.groups[0].mesh
        self.members = members_of(self.modules)
        # Over several dimensions the ranks have no group of their own, unless they are all that there are.
        everybody = len(self.members) == dist.get_world_size()
        self.group = dist.group.WORLD if everybody else self._mesh.get_group(0)
        self._closes = False
        self._used = set[Tensor]()  # had a gradient of this rank's own in this window
        self.factor = 1.0
        """What gradients are multiplied with as they arrive."""
        self._first = True
        self._asks = False
        self.failure: RankOutOfMemory | None = None
        """What the ranks know of each other's memory since they ask."""

    def attach(self, ranks: Any) -> None:
        if self._is_shared():
            gc.collect()  # it may be gone, but for a cycle
            if self._is_shared():
                raise ValueError(
                    "Another wrapped optimizer has other parameters of this sharded model (fully_shard), and would "
                    "have them reduced in the middle of its windows. Shard their parts separately, and pass each "
                    "optimizer its own: Optimizer(..., model=model.generator); or use DistributedDataParallel, under "
                    "which several optimizers may share a model."
                )
        super().attach(ranks)
        for module in self.modules:
            module.set_reduce_scatter_unused_params(True)  # other ranks may have a gradient where this one has none
        for group in self.groups:
            group.reduce_in_one_dtype()
        done = weakly(self._forward_done)
        self._hooks += [module.register_forward_hook(done) for module in self.modules]
        named = [(name, part) for module in self.modules for name, part in module.named_modules()]
        parts = [(name, part) for name, part in named if next(own_sharded_groups(part), None) is not None]
        for number, (name, part) in enumerate(parts, start=1):
            starts = functools.partial(weakly(self._forward_starts), name, number)
            self._hooks.append(part.register_forward_pre_hook(starts, prepend=True))

    def _is_shared(self) -> bool:
        """Whether another optimizer is there that has taken a module, and has other parameters of it."""
        others = [self.owners[module]() for module in self.modules if module in self.owners]
        own = {*self.parameters()}
        return any(other is not None and own.isdisjoint(other.parameters()) for other in others)

    def remove(self) -> bool:
        was_last = super().remove()
        for group in self.groups:
            group.ignore()
        if was_last:
            self._set(True)
            for module in self.modules:
                module.set_reduce_scatter_unused_params(False)
        return was_last

    # Passes.

    def _watching(self) -> Any:
        """The ranks that are to hear of a pass; None where it isn't one of a window."""
        return None if Shards.alone_now or not torch.is_grad_enabled() else self._ranks()

    def _forward_starts(self, name: str, number: int, module: Any, inputs: Any) -> None:
        if (ranks := self._watching()) is not None:
            self.passes = (self.passes * 31 + number) % 2**48
            if self._first and not Shards.asking_now:
                self.meet(name)
            ranks.forward_starts()

    def _forward_done(self, module: Any, inputs: Any, outputs: Any) -> None:
        if self._watching() is None:
            return
        if self._first and not Shards.asking_now:
            self.meet("")
        self.watch(self.groups)
        starts = weakly(self._backward_starts)
        for _, leaf in leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(starts)

    def _backward_starts(self, gradient: Tensor) -> None:
        if (ranks := self._ranks()) is not None:
            ranks.backward_starts()

    def watch(self, groups: Iterable[ShardedGroup]) -> None:
        """These have been gathered: see which gradients arrive."""
        arrives = weakly(self._arrives)
        for group in groups:
            group.watch(arrives)

    def _arrives(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if self.factor == 0.0:
            return torch.zeros_like(gradient)  # NaN and infinity go, too
        self._used.add(parameter)
        return gradient if self.factor == 1.0 else gradient * self.factor

    def scale(self, factor: float) -> None:
        """Multiply what arrives from now on; by 0: it is no gradient of this rank's."""
        # The optimizer's parameters have no hooks that would run: autograd works on gathered ones.
        self.factor = factor

    def hold(self, closes: bool) -> None:
        self._closes = closes
        self._set(closes)

    def _set(self, closes: bool) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(closes or self.always)
            if self.always:
                module.set_requires_all_reduce(closes)  # HSDP's second reduction
            module.set_is_last_backward(closes)
            module.set_reshard_after_backward(closes or self.always)

    # Passes in which all ranks ask each other before each collective.

    def meet(self, name: str, number: float = 0.0) -> float:
        """A collective is about to begin, or a sharded part's forward pass; `""`: all passes are done.

        Returns the largest number that a rank has come with; a RankOutOfMemory where some ranks won't come.
        """
        if self.failure is not None:  # code of the user's has gone on after the error
            raise self.failure
        messages = self._exchange(zlib.crc32(name.encode()), 0, 0, number)
        if self.failure is not None:
            raise self.failure
        if len({numbers[0] for numbers in messages}) > 1:
            raise WindowError(f"{DIFFERENT_PASSES} This rank is at {name or 'the end'!r}.")
        return max(numbers[3] for numbers in messages)

    def ran_out(self, cost: int, *, final: bool) -> RankOutOfMemory:
        """Tell the other ranks that memory ran out here, on so many rows or tokens. Returns what they all know."""
        if self.failure is None:
            self._exchange(0, _FINAL if final else _AGAIN, cost)
        assert self.failure is not None
        return self.failure

    def _exchange(self, *numbers: float) -> list[list[float]]:
        ranks = self._ranks()
        assert ranks is not None
        messages = ranks.messages.exchange(*numbers)
        costs = {rank: int(numbers[2]) for rank, numbers in enumerate(messages) if numbers[1]}
        if costs:
            self.failure = RankOutOfMemory(costs, any(numbers[1] == _FINAL for numbers in messages))
        return messages

    def ask_before(self, ask: Callable[[str], object] | None) -> None:
        """Call this before each gathering and each reduction, with its name; None: no more."""
        self.failure = None
        if self._asks or ask is not None:
            self._asks = Shards.asking_now = ask is not None
            for number, group in enumerate(self.groups):
                group.ask_before(ask, str(number))

    def start_over(self) -> None:
        """Forget the passes of this window: one of them failed, and no collective is under way."""
        self.ask_before(None)
        start_over(self.modules)
        self.clear()

    def stop(self) -> None:
        """An error: the passes will not be finished."""
        if self._asks:
            self.start_over()

    # Passes that gather nothing by themselves.

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
                yield {p: dtype for group in self.groups for p, dtype in group.gathered_dtypes().items()}
        finally:
            Shards.alone_now = False

    def gathered_bytes(self, gradients: int) -> int:
        """What gathered parameters and whole gradients take at most in a backward pass.

        `gradients`: bytes of all whole gradients in their parameters' dtype.
        """
        whole = sorted(group.gathered_bytes() for group in self.groups)
        if self.always:  # a group's, while the next one's are on their way
            return sum(gathered for gathered, _ in whole[-2:]) + 2 * max(reduced for _, reduced in whole)
        return sum(gathered for gathered, _ in whole) + max(sum(reduced for _, reduced in whole), gradients)

    # The window's sum.

    def reduce(self) -> None:
        try:
            self._reduce()
        except RankOutOfMemory as found:
            raise torch.OutOfMemoryError(
                f"Memory ran out on {found.ranks} while the gradients of a sharded model were reduced, which smaller "
                "micro-batches cannot help. No update was made."
            ) from None
        except Exception as error:
            if self._asks and is_out_of_memory(error):
                self.ran_out(0, final=True)
            raise
        self.ask_before(None)

    def _reduce(self) -> None:
        self._set(True)
        for group in self.groups:
            group.add_zeros_to_reduce()
        with torch.no_grad():
            for module in self.modules:
                module.set_reduce_scatter_unused_params(not self.always)  # there, the backward passes have done so
                finish_sharded_backward(module)
                module.set_reduce_scatter_unused_params(True)
        self._set(self._closes)

    def settle(self, source: int = 0) -> None:
        self.factor, self._first = 1.0, False
        self._forget_passes()

    def _forget_passes(self) -> None:
        self._used.clear()
        self.passes = 0

    def pending(self) -> list[Tensor]:
        return [tensor for group in self.groups for tensor in group.pending()]

    def clear(self) -> None:
        for group in self.groups:
            group.clear()
        self._forget_passes()

    def restored(self, parameters: Iterable[Tensor]) -> None:
        self._used.update(parameters)

    def sum(self, tensor: Tensor) -> Tensor:
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(tensor, group=self._mesh.get_group(dimension))
        return tensor

    # Parameters that no rank has used.

    def trained(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.trained()]

    def unused(self) -> list[int]:
        return [i for i, parameter in enumerate(self.trained()) if parameter not in self._used]


def run_together(
    ranks: Any,
    oom: OomRetry,
    plan: Plan,
    passes: Any,
    rows: int,
    least: int = 1,
    at_once: Callable[[], None] | None = None,
) -> None:
    """Run the micro-batches of a large batch where all ranks run their passes together: as many on every rank.

    A rank cuts its rows into as many micro-batches, of `least` rows or more, as the rank with the most has; one that
    has too few rows for that runs passes that count nothing. `at_once` runs all, in place of one after the other.
    """
    pieces = list(plan)
    most = int(max(ranks.messages.numbers(len(pieces))))
    if at_once is None and rows:
        pieces = plan.in_passes(most, least)
    filler = running = min(pieces, key=lambda piece: piece.tokens, default=Slice(slice(0, rows)))

    def run() -> None:
        nonlocal running
        if at_once is not None:
            at_once()
        else:
            for running in pieces:  # read by whoever catches an error
                oom.once(running, plan, passes)
        running = filler
        for _ in range(most - len(pieces)):
            passes.idle(passes.take(filler))

    _run(ranks.engine, oom, plan, run, lambda: running)


def _run(shards: Shards, oom: OomRetry, plan: Plan, run: Callable[[], None], running: Callable[[], Slice]) -> None:
    """Run the passes of a window. Where memory runs out on a rank, all begin the batch again, in smaller slices."""
    shards.ask_before(shards.meet)
    try:
        run()
        shards.meet("")
        return
    except Exception as error:
        smaller = isinstance(error, RestartWindow)  # this rank has taken a smaller size already
        if not (smaller or shards.failure is not None or is_out_of_memory(error)):
            raise
        piece = running()
        alone = None if smaller else plan.indivisible(piece) if piece.size else "no row"
        cost = 2 * plan.size if smaller else piece.tokens
        found = shards.ran_out(cost, final=alone is not None)
        learned = isinstance(error, RestartWindow) and error.plan is None
        if found.final:
            raise _final(error, found, alone) from error
    oom.meter.release()  # only here, out of reach of the error's frames, is its memory free
    shards.start_over()
    cost = min(found.costs.values())
    fewer = plan.too_large(cost) if plan.size > cost // 2 else plan  # where slices are small already, they stay
    if not learned:  # what the loss is, which these passes have shown
        logger.warning("Out of memory on %s: all ranks begin the batch again, in smaller micro-batches.", found.ranks)
    raise RestartWindow(fewer)


def _final(error: Exception, found: RankOutOfMemory, alone: str | None) -> torch.OutOfMemoryError:
    if not isinstance(error, RankOutOfMemory):
        if alone is not None:
            return nothing_fits(error, alone)
        return torch.OutOfMemoryError(
            f"{error}\nNo update was made on any rank. Give a smaller `micro_batch_size` or `max_tokens`."
        )
    return torch.OutOfMemoryError(
        f"Out of memory on {found.ranks}, with the smallest possible micro-batch. No update was made on any rank. Look "
        "at that rank's own error."
    )
