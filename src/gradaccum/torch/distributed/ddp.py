"""DistributedDataParallel: hold its reduction back to the window's end, let it happen, or bring it about."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.private import (
    accumulates,
    communication_hooks,
    drop_static_graph,
    hides_parameters,
    joins,
    mark_ready,
    rebuild_buckets,
    runs_in_forward,
    share_buffers,
)
from gradaccum.torch.distributed.owners import release, take, weakly

__all__ = ["Replicas"]

logger = logging.getLogger("gradaccum")

FIRST_BUCKET = 2**20
"""Bytes of the bucket that DDP reduces first, at most."""


class Passes(Protocol):
    """What is called when a model's passes begin and end."""

    def forward_done(self) -> None:
        """A forward pass that will reduce is done."""

    def backward_starts(self) -> None:
        """Its backward pass starts."""


class Replicas:
    """The DDP models whose gradients an optimizer takes, in the same order on every rank.

    DDP reduces in the backward pass of a forward pass that ran with `require_backward_grad_sync`, so that flag is set
    one micro-batch ahead. Where no backward pass comes to carry the reduction, `reduce` has DDP do the very same one:
    the same buckets in the same order through the same communication hooks, so one rank's manual reduction meets
    another's in backward.

    `wide`: gradients may be wider than their parameters, and than DDP's buckets: they are reduced without those.
    `own_only`: these models have more than the optimizer's model in them, which runs by itself.
    """

    sharded = False
    """Whether all ranks must run the same passes."""
    passes = 0

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        parameters: Sequence[Tensor],
        wide: bool,
        own_only: bool = False,
    ) -> None:
        self.models = list(models)
        self.group: dist.ProcessGroup = self.models[0].process_group
        self.members: list[int] = dist.get_process_group_ranks(self.group)
        self._optimized = set(parameters)
        _check_covered(self.models, parameters)
        self.flat = wide or not hasattr(self.models[0].reducer, "_autograd_hook")
        # Reductions of several models would start in the order of backward: here, every rank keeps one order.
        self.manual_reduce = self.flat or len(self.models) > 1 or any(model.static_graph for model in self.models)
        for model in self.models:
            _check_hooks(model)
            _without_static_graph(model)
            model.require_forward_param_sync = False  # DDP's constructor has synchronised the buffers
        self._reduced = [_reduced_parameters(model) for model in self.models]
        self._own_only = own_only
        if wide and any(map(communication_hooks, self.models)):
            logger.warning("accumulate_dtype: gradients are reduced in it directly, without DDP's communication hook")
        self._sparse = {
            part.weight
            for model in self.models
            for part in model.modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        }
        self._reduces = False
        self._hides: dict[nn.Module, bool] = {}
        self._used: set[Tensor] = set()
        self._own: set[Tensor] = set()  # had a gradient before a reduction
        self._foreign: set[Tensor] = set()  # got one by a reduction alone
        self._was_reduced = False  # since the last look at it
        self._filled: set[Tensor] | None = None  # with zeros by `reduce`, if that has run in this window
        self._first_bucket = _last_of_first_bucket(self.models[0], self._reduced[0])
        self._waiting: Any = None
        self._hooks: list[Any] = []

    def attach(self, passes: Passes) -> None:
        """Take the models, and tell this object of their passes. It is not kept alive."""
        self._passes = weakref.ref(passes)
        for model in self.models:
            starts, done = (torch.compiler.disable(weakly(call)) for call in (self._forward_starts, self._forward_done))
            self._hooks += [model.register_forward_pre_hook(starts), model.register_forward_hook(done)]
        if self.finds_unused:
            used = weakly(self._arrived)
            self._hooks += [p.register_post_accumulate_grad_hook(used) for p in self._parameters()]
        for other in take(self.models, self):
            if isinstance(other, Replicas) and other._optimized.isdisjoint(self._optimized):
                other._share()
                self._own_only = True
        if self._own_only:
            self._share()

    def _share(self) -> None:
        """Others run this model, or parts of it: an optimizer reduces its own parameters when its window closes."""
        if any(map(communication_hooks, self.models)):
            logger.warning("Gradients of parts of a DDP model are reduced without its communication hook")
        self._reduce_own()
        self._reduced = [[p for p in parameters if p in self._optimized] for parameters in self._reduced]

    def _reduce_own(self) -> None:
        """From now on no backward pass reduces, and DDP's reducer has no part in it."""
        self.flat = self.manual_reduce = True
        self.hold(False)

    def _forward_starts(self, model: Any, inputs: Any) -> None:
        if joins(model):
            raise ValueError(
                "model.join() waits for reductions that are held back to the window's end. Leave it out: ranks may "
                "have different numbers of micro-batches."
            )
        model.require_backward_grad_sync = self._reduces  # others set it, too: Lightning after each step

    def _forward_done(self, model: Any, inputs: Any, outputs: Any) -> None:
        passes = self._passes()
        if passes is None or not model.require_backward_grad_sync or not torch.is_grad_enabled():
            return
        passes.forward_done()
        found = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if model not in self._hides:
            self._hides[model] = any(map(hides_parameters, found))
        starts = weakly(lambda replicas, gradient: replicas._backward_starts(model), self)
        for leaf in found:
            leaf.register_hook(starts)

    def _backward_starts(self, model: DistributedDataParallel) -> None:
        passes = self._passes()
        if passes is not None and (self._hides[model] or accumulates(self._reduced[self.models.index(model)])):
            passes.backward_starts()

    def before_first_bucket(self, call: Callable[[], None]) -> None:
        """Call this once in the backward pass that runs, before DDP reduces its first bucket."""
        self._forget_waiting()
        if self._first_bucket.requires_grad:
            now = weakly(lambda replicas, parameter: replicas._call_waiting(), self)
            self._waiting = call, self._first_bucket.register_post_accumulate_grad_hook(now)

    def _call_waiting(self) -> None:
        waiting = self._waiting
        self._forget_waiting()
        if waiting is not None:
            waiting[0]()

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting[1].remove()
            self._waiting = None

    def _arrived(self, parameter: Tensor) -> None:
        self._used.add(parameter)

    def hold(self, closes: bool, reduces: bool = False) -> None:
        """Whether the next forward pass is of a micro-batch whose backward pass closes the window, or reduces it."""
        self._look_for_foreign()
        if not self.flat and runs_in_forward(self.models):  # the loop's body does, as in Lightning
            self._reduce_own()
        self._reduces = (closes or reduces) and not self.manual_reduce
        for model in self.models:
            model.require_backward_grad_sync = self._reduces

    @property
    def finds_unused(self) -> bool:
        """Whether parameters may be left without a gradient."""
        return any(model.find_unused_parameters for model in self.models)

    def starts(self) -> None:
        """The backward pass that reduces has started; more forward passes of this micro-batch belong to it no more."""
        self.hold(False)
        self._look_for_own()

    def _look_for_own(self) -> None:
        """A reduction is about to begin, after which zeros stand where no rank has used a parameter."""
        self._look_for_foreign()
        if self.finds_unused:
            self._own.update(p for p in self._parameters() if p.grad is not None and p not in self._foreign)
        self._was_reduced = True

    def _look_for_foreign(self) -> None:
        if self._was_reduced and self.finds_unused:
            own = self._own | self._used
            self._foreign.update(p for p in self._parameters() if p.grad is not None and p not in own)
        self._was_reduced = False

    def reduce(self) -> None:
        """Bring the sums in `p.grad` to their mean over the ranks, outside of a backward pass. All ranks take part."""
        self._look_for_own()
        # DDP cannot reduce a gradient that is missing and was there before a micro-batch was taken out of the sum.
        missing = self._missing()
        for parameter in missing:
            parameter.grad = self._zeros(parameter)
        self._filled = (self._filled or set()) | set(missing)
        for model, parameters in zip(self.models, self._reduced):
            if self.flat:
                _reduce_flat(parameters, model.process_group, model.bucket_bytes_cap)
            else:
                _reduce_by(model, parameters)

    def scale(self, factor: float, idle: bool) -> None:
        """Nothing: the parameters' own hooks can multiply what arrives."""

    def scale_more(self, factor: float) -> None:
        """Nothing."""

    def clear(self) -> None:
        """Drop what an open window has added up beside `p.grad`: nothing."""
        self._restart()

    def pending(self) -> list[Tensor]:
        """What an open window has added up beside `p.grad`."""
        return []

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def prepare(self) -> None:
        """After a reduction, do what DDP does in the next forward pass: in this micro-batch still, or not at all."""
        for model in self.models:
            rebuild_buckets(model)

    def settle(self, source: int = 0) -> None:
        """After a window, in which this rank had rows: DDP hands out its buffers."""
        self._restart()
        self.prepare()
        for model in self.models:
            share_buffers(model, source)

    def _restart(self) -> None:
        for found in (self._used, self._own, self._foreign):
            found.clear()
        self._was_reduced, self._filled = False, None
        self._forget_waiting()

    def continues(self) -> None:
        """The window goes on after a reduction: what was filled with zeros may get a gradient yet, or surely does."""
        if not self.finds_unused:
            self._filled = set()

    @property
    def filled(self) -> bool:
        """Whether zeros were reduced for a parameter that had no gradient on this rank in this window."""
        return bool(self._filled)

    @property
    def will_fill(self) -> bool:
        """The same, after a `reduce` that is to come."""
        return self.filled or bool(self._missing())

    def _missing(self) -> list[nn.Parameter]:
        return [p for p in self._parameters() if p.grad is None and p.requires_grad]

    def unused(self) -> list[int]:
        """The parameters that had no gradient on this rank in this window, by number."""
        parameters = self._parameters()
        if self.finds_unused:
            return [i for i, p in enumerate(parameters) if p not in self._used and p not in self._own]
        return [i for i, p in enumerate(parameters) if p in (self._filled or ())]

    def drop(self, unused: Iterable[int]) -> None:
        """These parameters had no gradient on any rank."""
        parameters = self._parameters()
        for index in unused:
            parameters[index].grad = None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameters in self._reduced for parameter in parameters]

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        if parameter in self._sparse:
            return torch.zeros_like(parameter, layout=torch.sparse_coo)
        return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)

    def remove(self) -> None:
        """Leave the models as they were found, unless another optimizer has taken them."""
        self._forget_waiting()
        for hook in self._hooks:
            hook.remove()
        if release(self.models, self):
            for model in self.models:
                model.require_backward_grad_sync = True


def _reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters in the order in which DDP's reducer counts them."""
    ignored = getattr(model, "parameters_to_ignore", ())
    return [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]


def _last_of_first_bucket(model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """The parameter whose gradient completes DDP's first bucket, if they come in the opposite order of their use.

    Where they don't, a rank that won't come is missed later: in the reduction, after the process group's timeout.
    """
    size, limit = 0, min(FIRST_BUCKET, model.bucket_bytes_cap)
    for parameter in reversed(parameters):
        size += parameter.numel() * parameter.element_size()
        if size >= limit:
            return parameter
    return parameters[0]


def _check_covered(models: Sequence[DistributedDataParallel], parameters: Sequence[Tensor]) -> None:
    covered = {parameter for model in models for parameter in model.parameters()}
    outside = [parameter for parameter in parameters if parameter.requires_grad and parameter not in covered]
    if outside:
        raise ValueError(
            f"{len(outside)} of the optimizer's parameters (the first of shape {tuple(outside[0].shape)}) are in none "
            "of `model`'s DistributedDataParallel modules, so their gradients would differ from rank to rank. Make "
            "them part of the model before DDP wraps it."
        )


class _Reduction(torch.autograd.Function):
    """A backward pass in which nothing is computed, and every gradient is ready."""

    @staticmethod
    def forward(ctx: Any, ready: Callable[[], None], leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.ready, ctx.parameters = ready, len(parameters)
        return torch.zeros_like(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ready()
        return (None, gradients[0].clone(), *([None] * ctx.parameters))


class _InPlaceOf(nn.Module):
    """Stands in for DDP's module in a forward pass that only starts a reduction."""

    def __init__(self, module: nn.Module, output: Callable[[], Tensor]) -> None:
        super().__init__()
        self._module, self._output = [module], output

    def forward(self, _: Tensor) -> Tensor:
        return self._output()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._module[0].named_buffers(*args, **kwargs)  # the ones that DDP may be about to broadcast


def _reduce_by(model: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Have DDP reduce what is in `p.grad` as if a backward pass had just added nothing to it.

    The parameters' own hooks don't see it: the pass ends before them, and tells DDP's reducer that they are ready.
    """
    leaf = torch.zeros((), device=parameters[0].device, requires_grad=True)
    reachable = [parameter for parameter in parameters if parameter.requires_grad]

    def ready() -> None:
        for index in range(len(parameters)):
            mark_ready(model, index)

    module = model.module
    with torch.enable_grad():
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = False  # buffers are handed out when it is known who had rows
        model.module = _InPlaceOf(module, lambda: _Reduction.apply(ready, leaf, *reachable))
        try:
            output = DistributedDataParallel.forward(model, torch.zeros((), device=leaf.device))
        finally:
            model.module = module
            model.require_backward_grad_sync = False
        output.backward(inputs=[leaf])


@torch.no_grad()
def _reduce_flat(parameters: list[nn.Parameter], group: dist.ProcessGroup, bytes_at_once: int) -> None:
    """Bring gradients of any dtype to their mean over the ranks, in flat buckets."""
    size = dist.get_world_size(group)
    bucket: list[nn.Parameter] = []
    filled = 0

    def flush() -> None:
        nonlocal filled
        if bucket:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None])
            dist.all_reduce(flat, group=group)
            flat /= size
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter.grad))
        bucket.clear()
        filled = 0

    for parameter in parameters:
        if parameter.grad is None:
            continue
        if bucket and bucket[-1].grad is not None and bucket[-1].grad.dtype != parameter.grad.dtype:
            flush()
        bucket.append(parameter)
        filled += parameter.numel() * parameter.grad.element_size()
        if filled >= bytes_at_once:
            flush()
    flush()


def _check_hooks(model: DistributedDataParallel) -> None:
    if any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in communication_hooks(model)):
        raise ValueError(
            "post_localSGD_hook reduces within a part of the ranks, so the ranks' updates are not that of all rows. "
            "Leave the communication hook out."
        )


def _without_static_graph(model: DistributedDataParallel) -> None:
    """DDP with `static_graph=True` counts the backward passes that don't reduce, too, and then waits for as many."""
    if not model.static_graph:
        return
    logger.warning(
        "static_graph=True cannot hold back DDP's reduction to the window's end. This model's gradients are reduced by "
        "step(), after the backward pass."
    )
    drop_static_graph(model)
