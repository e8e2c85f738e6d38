"""Which options of a `TrainStep` go together: every rule in one place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from gradaccum.on_torch.arguments import Sync, checked_choice, checked_scaler, needs_closure
from gradaccum.on_torch.batch import Batch
from gradaccum.schedule import checked_count
from gradaccum.torch.batch_norm import checked_batch_norm

GroupsChoice = int | Tensor | Sequence[int] | Callable[..., Any] | None
"""Rows that stay together: so many in a row, the rows' group ids, or `groups(*batch) -> ids`."""


@dataclasses.dataclass
class Options:
    """What was asked of a step beside its loss, checked."""

    optimizers: Any  # a list of them
    micro_batch_size: Any
    max_tokens: int | None
    pack: Any
    groups: Any
    scaler: Any
    gradients: dict[str, Any]  # what becomes of the finished gradient, for `gradient_stages`
    batch_norm: Any
    offload: Any
    noise_scale: Any
    sync: Any
    reproducible: bool = False
    compile: Any = False
    verify: bool = True
    has_aux: bool = False
    aux: Any = "auto"

    def __post_init__(self) -> None:
        self.batch_norm = checked_batch_norm(self.batch_norm)
        self.sync = checked_choice("sync", self.sync, get_args(Sync))
        check_exact(self.batch_norm, self.offload, self.max_tokens, self.groups)
        checked_groups(self.groups)
        self.scaler = checked_scaler(self.scaler)
        if self.pack is not None and self.max_tokens is None:
            raise ValueError("`pack` joins rows up to `max_tokens` tokens, so give `max_tokens`, too.")
        self.check_aux()
        self.searches = self.micro_batch_size == "auto" and self.max_tokens is None and self.batch_norm != "exact"
        """Whether sizes of micro-batches are searched for."""

    def check_optimizers(self) -> None:
        """Raise a TypeError or a ValueError where `optimizers` are none, or can't be stepped; list one."""
        self.optimizers = [*self.optimizers] if isinstance(self.optimizers, Sequence) else [self.optimizers]
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    "`optimizer` must be a torch.optim.Optimizer or a list of them. "
                    f"Received: {optimizer!r} of type {type(optimizer).__name__}."
                )
            if hasattr(optimizer, "micro_batches") and hasattr(optimizer, "inner"):
                raise ValueError(
                    f"TrainStep makes one update per call by itself. Received: {type(optimizer).__name__}, which "
                    "accumulates, too. Give it the inner optimizer."
                )
        if not self.optimizers:
            raise ValueError("`optimizer` must be a torch.optim.Optimizer or a list of them. Received: an empty list.")
        if self.scaler is not None and (closures := self.closures()):
            raise ValueError(
                f"A GradScaler cannot step {type(closures[0]).__name__}, which evaluates a closure. "
                "Leave `scaler` out, and use autocast=torch.bfloat16."
            )

        if self.has_aux and (closures := self.closures()):
            raise ValueError(
                f"has_aux=True can't be combined with {type(closures[0]).__name__}, which evaluates the batch several "
                "times. Leave one of them out."
            )

    def check_aux(self) -> None:
        if not isinstance(self.has_aux, bool):
            raise TypeError(f"`has_aux` must be True or False. Received: has_aux={self.has_aux!r}.")
        if not self.has_aux:
            if self.aux != "auto":
                raise ValueError(f"`aux` says what becomes of an aux, so give has_aux=True. Received: {self.aux!r}.")
            return
        for what, is_given in {
            "compile=": self.compile is not False,
            "reproducible=True": self.reproducible,
            'batch_norm="exact"': self.batch_norm == "exact",
        }.items():
            if is_given:
                raise ValueError(f"has_aux=True can't be combined with {what}. Leave one of them out.")

    def closures(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self.optimizers if needs_closure(optimizer)]


def check_exact(choice: str, offload: Any, max_tokens: int | None, groups: Any) -> None:
    """Whether these options of a `TrainStep` go together with what it does about BatchNorm."""
    if not isinstance(offload, bool):
        raise TypeError(f"`offload` must be True or False. Received: offload={offload!r}.")
    if offload and choice != "exact":
        raise ValueError(
            'offload=True keeps what crosses exact BatchNorm layers in host memory, so it needs batch_norm="exact". '
            f"Received: batch_norm={choice!r}."
        )
    if max_tokens is not None and choice == "exact":
        raise ValueError('batch_norm="exact" needs the whole batch as it is padded. Leave out `max_tokens`.')
    if groups is not None and choice == "exact":
        raise ValueError('batch_norm="exact" gives the loss all rows at once. Leave out `groups`.')


def check_optimized(optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
    """Raise a ValueError where optimizers have no parameter of these modules, as those of a copy have none."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    held = [parameter for o in optimizers for group in o.param_groups for parameter in group["params"]]
    if own and held and own.isdisjoint(map(id, held)):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"None of the parameters of {names} is one of the model's or the loss's, so updates would move nothing: "
            "the model has been copied, rebuilt or wrapped since. Build the optimizer from this model's parameters()."
        )


_GONE = {
    "head": "A huge vocabulary is torch.nn.LinearCrossEntropyLoss' (torch 2.13), whose divisor TrainStep knows: "
    "loss_fn=torch.nn.LinearCrossEntropyLoss(features, classes, options=torch.nn.LinearCrossEntropyOptions()).",
}
"""Arguments of earlier versions, and what takes their place."""


Init = TypeVar("Init", bound=Callable[..., None])


def loss_by_name(init: Init) -> Init:
    """Around `TrainStep.__init__`: names what takes the place of arguments that it doesn't have, or had."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        if len(args) > 2:
            raise TypeError(
                "TrainStep(model, optimizer, ...) takes its loss by keyword: loss_fn=... for loss_fn(model(x), y), or "
                f"compute_loss=... for compute_loss(model, *batch). Received: {args[2]!r} as the third argument."
            )
        for name in _GONE.keys() & keywords.keys():
            raise TypeError(f"TrainStep has no argument `{name}` any more. {_GONE[name]} Received: {keywords[name]!r}.")
        init(self, *args, **keywords)

    return checked  # type: ignore[return-value]  # the same signature


def inside(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel around it."""
    return model.get_submodule("module") if isinstance(model, nn.parallel.DistributedDataParallel) else model


def with_groups(batch: Batch, groups: GroupsChoice) -> Batch:
    """The batch with the groups of its rows; those of a group are brought together, where they lie apart."""
    if isinstance(groups, int):
        if batch.rows % groups:
            raise ValueError(
                f"groups={groups} keeps {groups} rows together, but the batch has {batch.rows}, which is no multiple "
                "of it. Give the rows' group ids, as a tensor or by a callable, where groups differ in size."
            )
        batch = batch.like(batch.tree)
        batch.groups = torch.arange(batch.rows) // groups
        return batch
    given = groups(*batch.tree) if callable(groups) else groups
    try:
        ids = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"`groups` must give one whole number for each of the batch's {batch.rows} rows. Received: {given!r:.100} "
            f"of type {type(given).__name__}. Number them, if they have names."
        ) from None
    if ids.dim() != 1 or len(ids) != batch.rows or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"`groups` must give one whole number for each of the batch's {batch.rows} rows. Received: shape "
            f"{tuple(ids.shape)}, {ids.dtype}."
        )
    unique, places = ids.unique(return_inverse=True)
    if len(ids.unique_consecutive()) > len(unique):  # some lie apart: in the order of their first rows
        first = torch.full((len(unique),), batch.rows).scatter_reduce(0, places, torch.arange(batch.rows), "amin")
        order = first[places].argsort(stable=True)
        batch, ids = batch.take(order), ids[order]
        batch.order = order
    batch = batch.like(batch.tree)
    batch.groups = ids
    return batch


def checked_groups(groups: Any) -> GroupsChoice:
    if isinstance(groups, int) and not isinstance(groups, bool):
        checked_count(groups, "groups")
    elif groups is not None and not callable(groups) and not isinstance(groups, (Tensor, list, tuple)):
        raise TypeError(
            "`groups` must be an int (so many rows in a row), the rows' group ids as a tensor, or a callable "
            f"groups(*batch) that returns them. Received: groups={groups!r} of type {type(groups).__name__}."
        )
    return groups
