"""Which options of a `TrainStep` go together: every rule in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import nn

from gradaccum.errors import WindowError
from gradaccum.on_torch.arguments import Sync, checked_choice, checked_dtype, checked_norm, checked_scaler
from gradaccum.torch.batch_norm import checked_batch_norm
from gradaccum.torch.layers import Blocks, Layers, checked_blocks
from gradaccum.torch.optimizer import needs_closure

__all__ = ["Options", "check_exact", "check_optimized", "checked_optimizers"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked of a step beside its loss, checked."""

    micro_batch_size: Any
    max_tokens: int | None
    pack: Any
    groups: Any
    clip_grad_norm: float | None
    clip_grad_value: float | None
    scaler: Any
    accumulate_dtype: torch.dtype | None
    batch_norm: Any
    offload: Any
    noise_scale: Any
    sync: Any
    blocks: Any
    head: Any

    @classmethod
    def checked(cls, **given: Any) -> Options:
        """These options, if they are what they must be, and go together."""
        options = dict(given)
        options["batch_norm"] = checked_batch_norm(given["batch_norm"])
        options["sync"] = checked_choice("sync", given["sync"], get_args(Sync))
        check_exact(given["batch_norm"], given["offload"], given["max_tokens"], given["groups"], given["blocks"])
        noise = bool(given["noise_scale"])
        options["blocks"] = checked_blocks(given["blocks"], batch_norm=given["batch_norm"], noise_scale=noise)
        options["clip_grad_norm"] = checked_norm(given["clip_grad_norm"])
        options["clip_grad_value"] = checked_norm(given["clip_grad_value"], "clip_grad_value")
        options["accumulate_dtype"] = checked_dtype(given["accumulate_dtype"])
        options["scaler"] = checked_scaler(given["scaler"])
        if given["pack"] is not None and given["max_tokens"] is None:
            raise ValueError("`pack` lays rows one behind the other up to `max_tokens` tokens. Give that, too.")
        return cls(**options)

    def check_scaler(self, demanding: Sequence[torch.optim.Optimizer]) -> None:
        """Raise a ValueError where a GradScaler is to step optimizers that demand a closure."""
        if demanding and self.scaler is not None:
            raise ValueError(
                f"A GradScaler cannot step {type(demanding[0]).__name__}, which evaluates a closure. "
                "Leave `scaler` out, and use autocast=torch.bfloat16."
            )

    def check_backward(self) -> None:
        """Raise a WindowError where `step.backward()` has no gradients to leave."""
        if isinstance(self.blocks, Blocks) and self.blocks.update == "in_backward":
            raise WindowError(
                "step.backward() leaves the large batch's gradient in `.grad`, and update='in_backward' frees it block "
                "by block. Call the step itself, or use update='after_backward'."
            )

    def check_sharded(self, layers: Layers | None) -> None:
        """Raise a ValueError where blocks of a sharded model are to live elsewhere."""
        if layers is not None and layers.offloaded is not None:
            raise ValueError(
                "Blocks(on='cpu') keeps whole blocks there, and of a sharded model each rank has a part. Use "
                "fully_shard(..., offload_policy=CPUOffloadPolicy()), which keeps those parts in host memory."
            )


def check_exact(choice: str, offload: Any, max_tokens: int | None, groups: Any, blocks: Any = None) -> None:
    """Whether these options of a `TrainStep` go together with what it does about BatchNorm."""
    if offload and choice != "exact" and blocks is None:
        raise ValueError(
            "offload=True keeps what crosses exact BatchNorm layers in host memory, or what lies between `blocks`, so "
            f'it needs batch_norm="exact" or `blocks`. Received: batch_norm={choice!r}, blocks=None.'
        )
    if choice == "exact" and not isinstance(offload, bool):
        raise TypeError(f'With batch_norm="exact" `offload` must be True or False. Received: offload={offload!r}.')
    if max_tokens is not None and choice == "exact":
        raise ValueError('batch_norm="exact" needs the whole batch as it is padded. Leave out `max_tokens`.')
    if groups is not None and choice == "exact":
        raise ValueError('batch_norm="exact" gives the loss all rows at once. Leave out `groups`.')


def checked_optimizers(optimizers: Any) -> tuple[list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
    """The optimizers, and those among them that demand a closure."""
    listed = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for optimizer in listed:
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
    if not listed:
        raise ValueError("`optimizer` must be a torch.optim.Optimizer or a list of them. Received: an empty list.")
    return listed, [optimizer for optimizer in listed if needs_closure(optimizer)]


def check_optimized(optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
    """Raise a ValueError where optimizers have no parameter of these modules, as those of a copy have none."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    held = [parameter for o in optimizers for group in o.param_groups for parameter in group["params"]]
    if own and held and own.isdisjoint(map(id, held)):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"None of the parameters of {names} is one of the model's or the loss's, so updates would move nothing: "
            "the model has been copied, rebuilt or wrapped since. Make the optimizer of this model's parameters()."
        )
