"""DistributedDataParallel: hold its reduction back to the window's end, let it happen, or bring it about."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.private import (
    after_backward,
    communication_hooks,
    drop_static_graph,
    hook_frozen,
    is_finalized,
    joins,
    of_first_bucket,
    rebuild_buckets,
    reduces_exactly,
    reduction_by_hand,
    share_buffers,
)
from gradaccum.torch.distributed.engine import Engine, weakly

logger = logging.getLogger("gradaccum")


class Replicas(Engine):
    """The DDP models whose gradients an optimizer takes, in the same order on every rank.

    DDP reduces in the backward pass of a forward pass that ran with `require_backward_grad_sync`, so that flag is set
    one micro-batch ahead. Where no backward pass comes to carry the reduction, `reduce` has DDP do the very same one:
    the same buckets in the same order through the same communication hooks, so one rank's manual reduction meets
    another's in backward.

    Without DDP's buckets are reduced: gradients that may be wider than their parameters (`wide`) or missing
    (`find_unused_parameters`), a part of a model's, where other optimizers have the rest, or DDP is around the
    optimizer's model (`outside`), and those of a model that was frozen or unfrozen after DDP had wrapped it.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        parameters: Callable[[], Iterable[Tensor]],
        *,
        wide: bool,
        outside: bool,
        whole_batches: bool,
    ) -> None:
        super().__init__(models, parameters)
        self.group = models[0].process_group
        self.members = dist.get_process_group_ranks(self.group)
        own = {*parameters()}
        _check(models, own)
        counted = [_parameters_of(model, trained=True) for model in models]
        others = len(set[Tensor]().union(*counted) - own)
        if others and not outside:
            logger.warning(
                "%d parameters of the DistributedDataParallel model are not in this optimizer, which reduces only the "
                "gradients of its own parameters. If they are trained, wrap their optimizer, too.",
                others,
            )
        statics = [model for model in models if model.static_graph]
        self._flat = not all(map(reduces_exactly, models, counted))
        self._flat |= wide or outside or bool(others) or any(model.find_unused_parameters for model in models)
        self._flat |= not hasattr(models[0].reducer, "_autograd_hook")
        # Reductions of several models would start in the order of backward: here, every rank keeps one order.
        self.manual_reduce = self._flat or len(models) > 1 or len(statics) > 0
        if statics:  # DDP counts backward passes that don't reduce, too, and then waits for as many
            logger.warning(
                "With static_graph=True, DDP's reduction can't be delayed to the window's end, so step() reduces this "
                "model's gradients after the backward pass."
            )
        for model in statics:
            drop_static_graph(model)
        for model in models:
            model.require_forward_param_sync = False  # DDP's constructor has synchronised the buffers
        if self._flat and any(map(communication_hooks, models)):
            logger.warning(
                "DDP's communication hook is not used here: gradients are of a wider dtype (accumulate_dtype), belong "
                "to a part of a model, or may be missing (find_unused_parameters; freezing or unfreezing after DDP has "
                "wrapped the model). They are reduced without it."
            )
        self.bucket_views = any(model.gradient_as_bucket_view for model in models)
        self._all = [p for model in models for p in _parameters_of(model, trained=not self._flat)]
        self._by_hand = [*map(reduction_by_hand, models, map(len, counted))]
        self._first: Tensor | None = None
        self._at_first: Any = None
        self._reduces = self._sees_end = False
        self._whole_batches = whole_batches  # in each, all passes are ours, and none reduces
        self._prepared = False  # DDP will reduce in the next backward pass, whatever the flag says by then
        self._filled = set[Tensor]()  # with zeros by `reduce`, in this window

    def attach(self, ranks: Any) -> None:
        super().attach(ranks)
        # At the end of the pass itself: reentrant checkpointing runs others inside, which bring gradients.
        self._at_output = weakly(ranks.pass_begins)
        for model in self.modules if not self._whole_batches else ():
            self._hooks.append(model.register_forward_pre_hook(weakly(self._forward_starts)))
            if not ranks.manual:
                self._hooks.append(model.register_forward_hook(weakly(self._forward_done)))
        if not self._flat:
            frozen = {p for model in self.modules for p in _parameters_of(model)}.difference(self._all)
            self._hooks += [hook_frozen(parameter, weakly(self._not_reduced)) for parameter in frozen]
        if not ranks.manual:
            self._watch_first_bucket()

    def _watch_first_bucket(self, *, look: bool = False) -> None:
        """The message is sent before DDP's first reduction, as it goes over the same process group."""
        first = of_first_bucket(self.modules[0], self._all, look=look)
        if first is not self._first:
            if self._at_first is not None:
                self._at_first.remove()
            self._first, self._at_first = first, first.register_post_accumulate_grad_hook(weakly(self._first_gradient))

    def remove(self) -> bool:
        was_last = super().remove()
        if self._at_first is not None:
            self._at_first.remove()
        for model in self.modules if was_last else ():
            model.require_backward_grad_sync = True
        return was_last

    # Passes.

    def hold(self, closes: bool) -> None:
        self._reduces, self._sees_end = closes, False
        for model in self.modules:
            if self._whole_batches:
                self._check_joined(model)
            if model.require_backward_grad_sync != closes:  # a module's attributes are slow to set
                model.require_backward_grad_sync = closes

    def _check_joined(self, model: Any) -> None:
        if joins(model):
            raise ValueError(
                "model.join() waits for reductions that are held back to the window's end. Leave it out: ranks may "
                "have different numbers of micro-batches."
            )

    def _forward_starts(self, model: Any, inputs: Any) -> None:
        self._check_joined(model)
        if model.require_backward_grad_sync != self._reduces:  # others set it, too: Lightning after each step
            model.require_backward_grad_sync = self._reduces
        if (self._reduces or self.stuck) and torch.is_grad_enabled() and (ranks := self._ranks()) is not None:
            if self.stuck:
                ranks.check_finished("an earlier window's")
                self.stuck = False
            ranks.forward_starts()

    def _forward_done(self, model: Any, inputs: Any, outputs: Any) -> None:
        if self._reduces and torch.is_grad_enabled():
            self._prepared = True
            found = [outputs] if isinstance(outputs, Tensor) else [leaf for _, leaf in leaves(outputs)]
            ends = [leaf.register_hook(self._at_output) for leaf in found if getattr(leaf, "requires_grad", False)]
            self._sees_end = bool(ends)

    def _first_gradient(self, parameter: Tensor) -> None:
        if not self._prepared or (ranks := self._ranks()) is None:
            return
        self._prepared = False
        if not self._reduces:
            after_backward(ranks.early_over)
            return
        if not self._sees_end:  # somebody's loop runs inside of the forward pass, as Lightning's does
            after_backward(ranks.pass_over)
        ranks.backward_starts()

    def _not_reduced(self, parameter: Tensor) -> None:
        if parameter in {*self.parameters()}:
            raise WindowError(
                f"A parameter of shape {tuple(parameter.shape)} has a gradient that DistributedDataParallel does not "
                "reduce, since it was frozen when DDP wrapped the model: it would differ from rank to rank. Wrap the "
                "model again after unfreezing, and build a new optimizer; or wrap it with find_unused_parameters=True."
            )

    def check_finished(self, whose: str) -> None:
        if not all(map(is_finalized, self.modules)):
            raise WindowError(
                f"DistributedDataParallel has not reduced {whose} gradients, because some parameters received none: "
                "they were not used, or were frozen after DDP had wrapped the model, or the backward pass failed. This "
                "rank has updated nothing. Wrap the model with find_unused_parameters=True; after a pass that failed, "
                "wrap it again, build a new optimizer, and continue from a checkpoint."
            )

    # The window's sum.

    def reduce(self) -> None:
        # DDP cannot reduce a gradient that is missing.
        for parameter in self._missing():
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
            self._filled.add(parameter)
        for model in self.modules:
            model.require_forward_param_sync = True  # as after a forward pass of DDP's: buffers are handed out
        if self._flat:
            gradients = [p.grad for p in self.trained() if p.grad is not None]
            _reduce_flat(gradients, self.group, self.modules[0].bucket_bytes_cap)
            return
        for reduce in self._by_hand:
            reduce()

    def settle(self, source: int = 0) -> None:
        self.clear()
        for model in self.modules:
            if rebuild_buckets(model) and self._at_first is not None and len({p.dtype for p in self._all}) > 1:
                self._watch_first_bucket(look=True)
            share_buffers(model, source)

    def clear(self) -> None:
        self._filled.clear()

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    # Parameters that no rank has used.

    def trained(self) -> list[nn.Parameter]:
        if not self._flat:
            return self._all
        own = set(self.parameters())
        return [parameter for parameter in self._all if parameter in own]

    def _missing(self) -> list[nn.Parameter]:
        # DDP goes on reducing what is frozen by now.
        return [p for p in self.trained() if p.grad is None and (p.requires_grad or not self._flat)]

    def unused(self) -> list[int]:
        if not (unused := self._filled or {*self._missing()}):
            return []
        return [i for i, parameter in enumerate(self.trained()) if parameter in unused]


def _check(models: Sequence[DistributedDataParallel], parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError where DDP's reduction would not make the update of all rows."""
    covered = {parameter for model in models for parameter in model.parameters()}
    outside = [parameter for parameter in parameters if parameter.requires_grad and parameter not in covered]
    if outside:
        raise ValueError(
            f"{len(outside)} of the optimizer's parameters (the first of shape {tuple(outside[0].shape)}) are in none "
            "of `model`'s DistributedDataParallel modules, so their gradients would differ from rank to rank. Make "
            "them part of the model before DDP wraps it."
        )
    if any(getattr(part, "sparse", False) and hasattr(part, "weight") for model in models for part in model.modules()):
        raise ValueError(
            "Windows over several ranks don't sum the sparse gradients of nn.Embedding(sparse=True). Use sparse=False."
        )
    hooks = [hook for model in models for hook, _ in communication_hooks(model)]
    if any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook in hooks):
        raise ValueError(
            "post_localSGD_hook reduces within a part of the ranks, so the ranks' updates are not that of all rows. "
            "Leave the communication hook out."
        )


def _parameters_of(model: DistributedDataParallel, trained: bool = False) -> list[nn.Parameter]:
    """The parameters that may be trained, in the order in which DDP counts them; `trained`: those that are now."""
    ignored, named = getattr(model, "parameters_to_ignore", ()), model.module.named_parameters()
    found = [p for name, p in named if name not in ignored and (p.is_floating_point() or p.is_complex())]
    return [p for p in found if p.requires_grad or not trained]


@torch.no_grad()
def _reduce_flat(gradients: Iterable[Tensor], group: dist.ProcessGroup, bytes_at_once: int) -> None:
    """Bring gradients of any dtype to their mean over the ranks, in flat buckets."""
    size, buckets, filled = dist.get_world_size(group), list[list[Tensor]](), bytes_at_once
    for gradient in gradients:
        if filled >= bytes_at_once or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(gradient)
        filled += gradient.numel() * gradient.element_size()
    for bucket in buckets:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket])):
            gradient.copy_(part.view_as(gradient))
