"""Finds out whether a model is replicated or sharded, and what keeps its windows together with the other ranks'."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch.distributed.ddp import Replicas
from gradaccum.torch.distributed.engine import Engine
from gradaccum.torch.distributed.fsdp import Shards, is_sharded, sharded_modules
from gradaccum.torch.distributed.ranks import Ranks
from gradaccum.torch.distributed.settings import Settings

logger = logging.getLogger("gradaccum")


def detect_ranks(
    model: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    manual_reduce: bool = False,
    whole_batches: bool = False,
    options: Mapping[str, Any],
) -> Ranks:
    """What keeps the windows of this model together with those of the other ranks, if there are any.

    The optimizers make an update together. The options must be the same on every rank, `accumulate_dtype` and `sync`
    among them. `manual_reduce`: no backward pass may reduce, since the sum is finished only afterwards; nor where each
    window is one call, on `whole_batches`.
    """
    replicas, shards = ([], []) if model is None or not _has_ranks() else _data_parallel(model)
    if model is None or not (replicas or shards):
        return Ranks()

    def groups() -> list[dict[str, Any]]:
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    def parameters() -> list[Tensor]:
        return [p for group in groups() for p in group["params"]]

    dtype, always = options["accumulate_dtype"], options["sync"] == "micro_batch"
    floats = [p.dtype for p in parameters() if dtype is not None and p.is_floating_point()]
    wide = any(torch.finfo(own).bits < torch.finfo(dtype).bits for own in floats)
    engine: Engine
    if shards:
        _check_shards(parameters(), wide)
        engine = Shards(shards, parameters, always)
    else:
        outside = not {*replicas} <= {*model.modules()}
        engine = Replicas(replicas, parameters, wide=wide, outside=outside, whole_batches=whole_batches)
        if always:
            logger.warning(
                'sync="micro_batch" is for sharded models: each rank has all gradients of a DistributedDataParallel '
                "model, so they are reduced once per window."
            )
    manual_reduce |= whole_batches
    return Ranks(engine, Settings(groups), options=options, manual_reduce=manual_reduce)


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _existing(*kinds: type) -> Iterator[Any]:
    """All modules of these kinds that this process has. By type, without isinstance: other objects may be proxies."""
    return (o for o in gc.get_objects() if issubclass(type(o), kinds))


def _data_parallel(model: nn.Module) -> tuple[list[DistributedDataParallel], list[nn.Module]]:
    """What is replicated in a model, or around it, as Lightning does, and what is sharded."""
    replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    shards = sharded_modules(model) if not replicas else []
    if not (replicas or shards) and dist.get_world_size() > 1:
        replicas = [module for module in _existing(DistributedDataParallel) if model in {*module.modules()}][-1:]
    return replicas, shards


def _check_shards(parameters: Sequence[Tensor], wide: bool) -> None:
    if not any(is_sharded(parameter) for parameter in parameters):
        raise ValueError(
            "None of the optimizer's parameters is sharded, but `model` is, because fully_shard has replaced its "
            "parameters. Shard the model first, then build the inner optimizer and its wrapper from it, on every rank."
        )
    whole = [parameter for parameter in parameters if parameter.requires_grad and not is_sharded(parameter)]
    if whole:
        raise ValueError(
            f"{len(whole)} of the optimizer's parameters (the first of shape {tuple(whole[0].shape)}) are not sharded, "
            "so their gradients would differ from rank to rank. Shard the model that contains them, too, and don't "
            "list them in `ignored_params`."
        )
    if wide:
        raise ValueError(
            "A sharded model sums gradients in the dtype that fully_shard was given. In place of accumulate_dtype use "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."
        )


def check_closures(evaluating: Iterable[torch.optim.Optimizer], ranks: Ranks) -> None:
    """Raise a ValueError if one of these evaluates its closure by itself, and ranks would have to keep up with it."""
    found = next(iter(evaluating), None)
    if found is not None and ranks.size > 1:
        raise ValueError(
            f"{type(found).__name__} evaluates its closure several times in an update, and each time {ranks.size} "
            "ranks would have to reduce their gradients. Train on one rank, with gradaccum.torch.TrainStep, or use "
            "another optimizer."
        )


def check_detected(model: nn.Module | None, parameters: Sequence[Tensor], ranks: Ranks, steps: int | None) -> None:
    """Raise a ValueError, or warn, if these parameters are data-parallel and the optimizer doesn't know it."""
    if ranks.is_distributed or not _has_ranks() or dist.get_world_size() == 1:
        return
    own = {id(parameter) for parameter in parameters}
    if own and model is not None and own.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            "None of the optimizer's parameters is in `model`; fully_shard may have replaced them. Shard the model "
            "first, then build the inner optimizer and its wrapper from it, on every rank."
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # it takes a second to import, and has been, where one is there
    kinds = (DistributedDataParallel, *(() if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)))
    found = next((o for o in _existing(*kinds) if not own.isdisjoint(map(id, o.parameters()))), None)
    if found is not None:
        replicated = issubclass(type(found), DistributedDataParallel)
        message = _of_replicas(found, model is not None) if replicated else _FSDP1
        message = _UNKNOWN_SHARDS if not replicated and any(map(is_sharded, parameters)) else message
        if steps != 1 or (replicated and model is not None):  # else each micro-batch updates
            raise ValueError(message)
        logger.warning(message)


def _of_replicas(found: Any, has_model: bool) -> str:
    kinds = type(getattr(found, "module", None)).__mro__
    in_lightning = any(kind.__module__.startswith(("lightning.pytorch", "pytorch_lightning")) for kind in kinds)
    message, advice = (_WRAPPED_LATER, _WRAP_FIRST) if has_model else (_UNKNOWN, "Pass model=ddp.")
    return f"{message} {_IN_LIGHTNING if in_lightning else advice}"


_UNKNOWN_SHARDS = (
    "The parameters belong to a sharded model (fully_shard) that the optimizer does not know, so every micro-batch is "
    "reduced, and all ranks weigh the same whatever their rows. Pass model=, the sharded model."
)
_FSDP1 = (
    "The parameters belong to a FullyShardedDataParallel model (FSDP1), which the optimizer does not know: all ranks "
    "weigh the same whatever their rows. Shard the model with fully_shard, and pass model=."
)
_UNKNOWN = (
    "The parameters belong to a DistributedDataParallel model that the optimizer does not know, so every "
    "micro-batch is reduced, and all ranks weigh the same whatever their rows."
)
_WRAPPED_LATER = (
    "`model` was wrapped in DistributedDataParallel after the optimizer was built, so every micro-batch is reduced and "
    "all ranks weigh the same."
)
_WRAP_FIRST = "Wrap the model first, and pass that, on every rank: Optimizer(..., model=ddp)."
_IN_LIGHTNING = (
    "Lightning's Trainer wraps the module after its optimizers. On several devices use automatic optimization with "
    "gradaccum.integrations.lightning.GradientAccumulation; or a loop with Fabric, where model = fabric.setup(model) "
    "comes first; or TrainStep, made in on_fit_start."
)
