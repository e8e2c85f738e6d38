"""What an Accelerator must be, and which of its models an optimizer belongs to."""

from __future__ import annotations

import gc
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["check_alone", "check_distribution", "is_replicated", "model_of"]

_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def check_distribution(accelerator: Accelerator, sharded: bool) -> None:
    """Raise if this way to distribute is not known here."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not sharded:
        raise ValueError(
            "FSDP1 reduces in every backward pass, and takes the mean of the ranks' means. Use FSDP2: "
            "FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    if kind not in _KNOWN and not sharded:
        raise ValueError(
            "prepare_optimizer works on one device, with DistributedDataParallel, and with FSDP2. Received: an "
            f"Accelerator of type {kind.value}. Remove its plugin."
        )


def check_alone(state: Any) -> None:
    """Raise if Accelerate accumulates as well."""
    if state.num_steps != 1:
        raise ValueError(
            "Accelerate and gradaccum both accumulate. Received: Accelerator(gradient_accumulation_steps="
            f"{state.num_steps}). Remove it, and GradientAccumulationPlugin(num_steps=...), from the Accelerator."
        )


def model_of(accelerator: Accelerator, optimizer: Any) -> nn.Module | None:
    """The prepared model that has the optimizer's parameters."""
    own = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    models = accelerator._models
    if accelerator.distributed_type in _KNOWN and accelerator.num_processes > 1:
        # Accelerate keeps the modules inside. By type, without isinstance: other objects may be proxies.
        models = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return next((m for m in models if any(id(p) in own for p in m.parameters())), None)


def is_replicated(model: nn.Module | None) -> bool:
    """Whether the model, or a part of it, is one that the ranks train together."""
    return model is not None and any(isinstance(module, DistributedDataParallel) for module in model.modules())
