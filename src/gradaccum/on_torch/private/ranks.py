"""What is used of process groups, DistributedDataParallel and FSDP2 beyond their public API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "ShardedGroup",
    "communication_hooks",
    "default_store",
    "drop_static_graph",
    "finish_sharded_backward",
    "joins",
    "mark_ready",
    "own_sharded_groups",
    "prepare_next_forward",
    "sharded_groups",
    "timeout_of",
]


# Process groups.


def default_store() -> Any:
    """Where all ranks can leave word for each other, without a collective."""
    return torch.distributed.distributed_c10d._get_default_store()


def timeout_of(group: Any) -> timedelta | None:
    """How long this process group waits; None if unknown, which gives torch's default of half an hour."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError):
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


# DistributedDataParallel.


def communication_hooks(model: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """The registered communication hooks, each with its state."""
    return getattr(model, "_comm_hooks", ())


def mark_ready(model: DistributedDataParallel, index: int) -> None:
    """In a backward pass: tell DDP's reducer that this parameter's gradient is finished."""
    model.reducer._autograd_hook(index)  # type: ignore[attr-defined]


def prepare_next_forward(model: DistributedDataParallel) -> None:
    """Do what DDP would do in the next forward pass, which not all ranks may have: buckets, buffers."""
    if hasattr(model.reducer, "_rebuild_buckets"):
        model.reducer._rebuild_buckets()
    if not model.will_sync_module_buffers() or hasattr(model, "buffer_hook"):
        return
    if hasattr(model, "_sync_buffers"):
        model._sync_buffers()
    else:
        for buffer in model.module.buffers():
            dist.broadcast(buffer, group=model.process_group, group_src=0)
    model.require_forward_param_sync = False


def joins(model: DistributedDataParallel) -> bool:
    """Whether this is inside of `model.join()`."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


def drop_static_graph(model: DistributedDataParallel) -> None:
    """Build DDP's reducer again, without `static_graph`."""
    model.static_graph = model.find_unused_parameters = False
    model._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    model._ddp_init_helper(parameters, sparse, model._build_debug_param_to_name_mapping(parameters), False)
    for hook, state in communication_hooks(model):
        dist._register_comm_hook(model.reducer, state, hook)


# FSDP2.


class ShardedGroup:
    """The parameters that FSDP2 gathers and reduces together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._watched: dict[Tensor, Any] = {}

    @property
    def mesh(self) -> Any:
        """The devices that share them."""
        return self._group.mesh_info.mesh

    def pending(self) -> list[Tensor]:
        """What has been added up and is not reduced yet."""
        found: list[Tensor | None] = [self._group._partial_reduce_output]
        for parameter in self._group.fsdp_params:
            found.append(parameter.unsharded_accumulated_grad)
            if hasattr(parameter, "_unsharded_param"):
                found.append(parameter._unsharded_param.grad)
        return [tensor for tensor in found if tensor is not None]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer knows: this rank's shards."""
        return [parameter.sharded_param for parameter in self._trained()]

    def _trained(self) -> list[Any]:
        return [parameter for parameter in self._group.fsdp_params if parameter.sharded_param.requires_grad]

    def watch(self, arrives: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        """Pass each gradient through this function, with its parameter, before it joins the sum."""
        for parameter in self._trained():
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and whole not in self._watched:
                self._watched[whole] = whole.register_hook(functools.partial(arrives, parameter.sharded_param))

    def ignore(self) -> None:
        """Stop watching."""
        while self._watched:
            self._watched.popitem()[1].remove()

    def clear(self) -> None:
        """Drop what has been added up."""
        for parameter in self._group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        self._group._partial_reduce_output = None

    def add_zeros_to_reduce(self) -> None:
        """HSDP's second reduction goes only with a first one: of zeros, where nothing else is left for it."""
        if self._group._partial_reduce_output is None:
            return
        for parameter in self._group.fsdp_params:
            if hasattr(parameter, "_unsharded_param") and parameter.sharded_param.requires_grad:
                whole = parameter._unsharded_param
                dtype = parameter.reduce_dtype or whole.dtype
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype, requires_grad=False)


def sharded_groups(module: nn.Module) -> Iterator[ShardedGroup]:
    """The groups of a sharded module and of all modules in it."""
    for part in module.modules():
        yield from own_sharded_groups(part)


def own_sharded_groups(module: Any) -> Iterator[ShardedGroup]:
    """The groups of a sharded module itself."""
    if hasattr(module, "_get_fsdp_state"):
        yield from map(ShardedGroup, module._get_fsdp_state()._fsdp_param_groups)


def finish_sharded_backward(module: Any) -> None:
    """What FSDP2 does at a backward pass's end, of a sharded module that is nobody's part: reduce what is left."""
    state = module._get_fsdp_state()
    state._lazy_init()  # no forward pass has done it where the window came from a checkpoint
    state._root_post_backward_final_callback()
