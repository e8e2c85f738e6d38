"""DistributedDataParallel: hold its reduction back to the window's end, let it happen, or bring it about."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from gradaccum.torch.distributed.engine import Engine, weakly

__all__ = ["Replicas"]

logger = logging.getLogger("gradaccum")

FIRST_BUCKET = 2**20
"""Bytes of the bucket that DDP reduces first, at most."""


class Replicas(Engine):
    """The DDP models whose gradients an optimizer takes, in the same order on every rank.

    DDP reduces in the backward pass of a forward pass that ran with `require_backward_grad_sync`, so that flag is set
    one micro-batch ahead. Where no backward pass comes to carry the reduction, `reduce` has DDP do the very same one:
    the same buckets in the same order through the same communication hooks, so one rank's manual reduction meets
    another's in backward.

    `wide`: gradients may be wider than their parameters, and than DDP's buckets: they are reduced without those.
    `own_only`: these models have more than the optimizer's model in them, which runs by itself.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        parameters: Sequence[Tensor],
        *,
        always: bool,
        wide: bool,
        own_only: bool,
    ) -> None:
        super().__init__(models, parameters)
        self.always = always
        self.group = models[0].process_group
        self.members = dist.get_process_group_ranks(self.group)
        _check(models, parameters)
        self.flat = wide or not hasattr(models[0].reducer, "_autograd_hook")
        # Reductions of several models would start in the order of backward: here, every rank keeps one order.
        self.manual_reduce = self.flat or len(models) > 1 or any(model.static_graph for model in models)
        for model in models:
            if model.static_graph:  # it counts backward passes that don't reduce, too, and then waits for as many
                logger.warning(
                    "static_graph=True cannot hold back DDP's reduction to the window's end. This model's gradients "
                    "are reduced by step(), after the backward pass."
                )
                drop_static_graph(model)
            model.require_forward_param_sync = False  # DDP's constructor has synchronised the buffers
        self._reduced = [_reduced_parameters(model) for model in models]
        self._own_only = own_only
        if wide and any(map(communication_hooks, models)):
            logger.warning("accumulate_dtype: gradients are reduced in it directly, without DDP's communication hook")
        self.finds_unused = any(model.find_unused_parameters for model in models)
        self._foreign: set[Tensor] = set()  # got a gradient by a reduction alone
        self._was_reduced = False  # since the last look at it
        self._filled: set[Tensor] = set()  # with zeros by `reduce`, in this window
        self._reduces = False
        self._hides: dict[nn.Module, bool] = {}
        self._first_bucket = _last_of_first_bucket(models[0], self._reduced[0])
        self._waiting: Any = None

    def attach(self, ranks: Any) -> None:
        super().attach(ranks)
        for model in self.modules:
            starts, done = (torch.compiler.disable(weakly(call)) for call in (self._forward_starts, self._forward_done))
            self._hooks += [model.register_forward_pre_hook(starts), model.register_forward_hook(done)]
        if self.finds_unused:
            used = weakly(lambda replicas, parameter: replicas._used.add(parameter), self)
            self._hooks += [p.register_post_accumulate_grad_hook(used) for p in self.trained()]
        for other in self._take():
            assert isinstance(other, Replicas)
            other._share()
            self._own_only = True
        if self._own_only:
            self._share()

    def remove(self) -> None:
        self._forget_waiting()
        super().remove()
        if self._release():
            for model in self.modules:
                model.require_backward_grad_sync = True

    def _share(self) -> None:
        """Others run this model, or parts of it: an optimizer reduces its own parameters when its window closes."""
        if any(map(communication_hooks, self.modules)):
            logger.warning("Gradients of parts of a DDP model are reduced without its communication hook")
        self._reduce_own()
        self._reduced = [[p for p in parameters if p in self.optimized] for parameters in self._reduced]

    def _reduce_own(self) -> None:
        """From now on no backward pass reduces, and DDP's reducer has no part in it."""
        self.flat = self.manual_reduce = True
        self.hold(False)

    # Passes.

    def hold(self, closes: bool, reduces: bool = False) -> None:
        self._look()
        if not self.flat and runs_in_forward(self.modules):  # the loop's body does, as in Lightning
            self._reduce_own()
        self._reduces = (closes or reduces) and not self.manual_reduce
        for model in self.modules:
            model.require_backward_grad_sync = self._reduces

    def _forward_starts(self, model: Any, inputs: Any) -> None:
        if joins(model):
            raise ValueError(
                "model.join() waits for reductions that are held back to the window's end. Leave it out: ranks may "
                "have different numbers of micro-batches."
            )
        model.require_backward_grad_sync = self._reduces  # others set it, too: Lightning after each step

    def _forward_done(self, model: Any, inputs: Any, outputs: Any) -> None:
        ranks = self._ranks()
        if ranks is None or not model.require_backward_grad_sync or not torch.is_grad_enabled():
            return
        ranks.forward_done()
        found = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if model not in self._hides:
            self._hides[model] = any(map(hides_parameters, found))
        starts = weakly(lambda replicas, gradient: replicas._backward_starts(model), self)
        for leaf in found:
            leaf.register_hook(starts)

    def _backward_starts(self, model: DistributedDataParallel) -> None:
        ranks = self._ranks()
        if ranks is not None and (self._hides[model] or accumulates(self._reduced[self.modules.index(model)])):
            ranks.backward_starts()

    def starts(self) -> None:
        self.hold(False)
        self._look(reduces=True)

    def await_first_bucket(self) -> None:
        """In the backward pass that runs, call the ranks before DDP reduces its first bucket."""
        self._forget_waiting()
        if self._first_bucket.requires_grad:
            arrives = weakly(self._first_bucket_arrives)
            self._waiting = self._first_bucket.register_post_accumulate_grad_hook(arrives)

    def _first_bucket_arrives(self, parameter: Tensor) -> None:
        self._forget_waiting()
        if (ranks := self._ranks()) is not None:
            ranks.first_bucket()

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    # The window's sum.

    def reduce(self) -> None:
        self._look(reduces=True)
        # DDP cannot reduce a gradient that is missing and was there before a micro-batch was taken out of the sum.
        missing = self._missing()
        tables = (nn.Embedding, nn.EmbeddingBag)
        parts = (
            [part for model in self.modules for part in model.modules() if isinstance(part, tables)] if missing else []
        )
        sparse = {part.weight for part in parts if part.sparse}
        for parameter in missing:
            layout = torch.sparse_coo if parameter in sparse else parameter.layout
            dtype = parameter.dtype if parameter in sparse else parameter.grad_dtype or parameter.dtype
            parameter.grad = torch.zeros_like(parameter, layout=layout, dtype=dtype)
        self._filled.update(missing)
        for model, parameters in zip(self.modules, self._reduced):
            if self.flat:
                _reduce_flat(parameters, model.process_group, model.bucket_bytes_cap)
            else:
                _reduce_by(model, parameters)

    def prepare(self) -> None:
        for model in self.modules:
            rebuild_buckets(model)

    def continues(self) -> None:
        if not self.finds_unused:  # what was filled with zeros may get a gradient yet
            self._filled.clear()

    def settle(self, source: int = 0) -> None:
        self.clear()
        self.prepare()
        for model in self.modules:
            share_buffers(model, source)

    def clear(self) -> None:
        for found in (self._used, self._foreign, self._filled):
            found.clear()
        self._was_reduced = False
        self._forget_waiting()

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    # Parameters that no rank has used.

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameters in self._reduced for parameter in parameters]

    def _look(self, reduces: bool = False) -> None:
        """See whose gradients are this rank's own; `reduces`: zeros may stand for others after what begins now."""
        if self.finds_unused and (self._was_reduced or reduces):
            there = {p for p in self.trained() if p.grad is not None}
            if self._was_reduced:
                self._foreign |= there - self._used
            if reduces:
                self._used |= there - self._foreign
        self._was_reduced = reduces

    def _missing(self) -> list[nn.Parameter]:
        return [p for p in self.trained() if p.grad is None and p.requires_grad]

    @property
    def filled(self) -> bool:
        return bool(self._filled)

    @property
    def will_fill(self) -> bool:
        return self.filled or bool(self._missing())

    def unused(self) -> list[int]:
        if self.finds_unused:
            return super().unused()
        return [i for i, parameter in enumerate(self.trained()) if parameter in self._filled]


def _check(models: Sequence[DistributedDataParallel], parameters: Sequence[Tensor]) -> None:
    """Raise a ValueError where DDP's reduction would not make the update of all rows."""
    covered = {parameter for model in models for parameter in model.parameters()}
    outside = [parameter for parameter in parameters if parameter.requires_grad and parameter not in covered]
    if outside:
        raise ValueError(
            f"{len(outside)} of the optimizer's parameters (the first of shape {tuple(outside[0].shape)}) are in none "
            "of `model`'s DistributedDataParallel modules, so their gradients would differ from rank to rank. Make "
            "them part of the model before DDP wraps it."
        )
    hooks = [hook for model in models for hook, _ in communication_hooks(model)]
    if any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook in hooks):
        raise ValueError(
            "post_localSGD_hook reduces within a part of the ranks, so the ranks' updates are not that of all rows. "
            "Leave the communication hook out."
        )


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
    buckets, filled = list[list[Tensor]](), bytes_at_once
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        if filled >= bytes_at_once or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(gradient)
        filled += gradient.numel() * gradient.element_size()
    for bucket in buckets:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket])):
            gradient.copy_(part.view_as(gradient))
