"""What a `BlockStep` doesn't combine with, and what to do instead: one list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradaccum.on_torch.arguments import needs_closure
from gradaccum.torch.layers.blocks import Block

NOT_TAKEN = {
    "scaler": "A GradScaler makes an update only where all gradients are finite. Use autocast=torch.bfloat16.",
    "noise_scale": "No micro-batch's gradient is ever complete here. Measure the noise scale with TrainStep.",
    "sync": "It runs on one device. Use TrainStep on several ranks.",
    "reproducible": "It runs on one device. Use TrainStep on several ranks.",
    "compile": "Compile the blocks instead: `for block in model.layers: block.compile()`.",
    "has_aux": "It returns the loss alone. Use TrainStep, or evaluate the model once more.",
    "aux": "It returns the loss alone. Use TrainStep, or evaluate the model once more.",
}
"""Arguments of `TrainStep` that a `BlockStep` doesn't have."""


def checked_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Around `BlockStep.__init__`: names what to do in place of an argument that only `TrainStep` has."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        if len(args) > 2:
            raise TypeError(f"BlockStep(model, optimizer, ...) takes all else by keyword. Received: {args[2]!r}.")
        for name in keywords.keys() & NOT_TAKEN.keys():
            raise TypeError(f"BlockStep takes no `{name}`. {NOT_TAKEN[name]}")
        init(self, *args, **keywords)

    return checked


def check_combination(
    model: nn.Module,
    blocks: Sequence[Block],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    batch_norm: str,
    in_backward: bool,
    clips: bool,
) -> None:
    """Raise a ValueError that names what these blocks don't go with."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    parallel = kinds & {"DistributedDataParallel", "DataParallel", "FSDPModule", "FullyShardedDataParallel"}
    sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
    for wrong, why in (
        (parallel, f"{', '.join(parallel)}, because it runs on one device. Use TrainStep on several"),
        (sharded, "sharded parameters, because it runs on one device. Use TrainStep on several"),
        ("SyncBatchNorm" in kinds, "SyncBatchNorm, which waits for other ranks. Use GroupNorm"),
        (
            _compiled_around(model, blocks),
            "torch.compile around blocks, which makes one program of them. Compile each block instead: "
            "`for block in model.layers: block.compile()`",
        ),
        (batch_norm == "exact", 'batch_norm="exact", which needs all rows at once. Use TrainStep'),
        *(
            (needs_closure(optimizer), f"{type(optimizer).__name__}, which evaluates a closure. Use TrainStep")
            for optimizer in optimizers
        ),
        (
            in_backward and clips,
            "update='in_backward' and `clip_grad_norm` together, because the norm needs all gradients and each is "
            "freed before the next is known. Use update='after_backward', or `clip_grad_value`",
        ),
    ):
        if wrong:
            raise ValueError(f"BlockStep doesn't take {why}.")


def _compiled_around(model: nn.Module, blocks: Sequence[Block]) -> bool:
    """True if `torch.compile` has wrapped a module that contains a block."""
    own = {id(block.module) for block in blocks}
    compiled = [module for module in model.modules() if type(module).__name__ == "OptimizedModule"]
    return any(id(part) in own for module in compiled for part in module.modules() if part is not module)
