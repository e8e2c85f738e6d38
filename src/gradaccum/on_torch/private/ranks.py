"""What is used of process groups and DistributedDataParallel beyond their public API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# Process groups.


def default_store() -> Any:
    """Where all ranks can leave word for each other, without a collective."""
    return torch.distributed.distributed_c10d._get_default_store()


def timeout_of(group: Any) -> timedelta | None:
    """How long this process group waits; None if unknown, which gives torch's default of half an hour."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = group._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return None


# DistributedDataParallel.


def communication_hooks(model: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """The registered communication hooks, each with its state."""
    return model._comm_hooks


def reduce_by_hand(model: DistributedDataParallel, parameters: int, device: torch.device) -> None:
    """Have DDP reduce what is in `p.grad` as if a backward pass had just added nothing to so many parameters.

    They become ready in the opposite order of their use, as in a backward pass: DDP makes its buckets by the first one.
    """
    leaf, reducer = torch.zeros((), device=device, requires_grad=True), cast(Any, model.reducer)
    with torch.enable_grad():
        output = leaf.clone()
    output.register_hook(lambda _: [reducer._autograd_hook(index) for index in reversed(range(parameters))] and None)
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    output.backward(inputs=[leaf])


def reduces_exactly(model: DistributedDataParallel, parameters: Sequence[Tensor]) -> bool:
    """Whether these are what DDP reduces: what required gradients when it wrapped the model."""
    if model._get_ddp_logging_data().get("num_parameter_tensors", len(parameters)) != len(parameters):
        return False
    if all(p.requires_grad for p in model.module.parameters()):
        return True
    return {p for bucket in model.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()} == {*parameters}


def is_finalized(model: DistributedDataParallel) -> bool:
    """Whether the last reduction that a backward pass began has come to its end."""
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def hook_frozen(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Hook a parameter that requires no gradient yet: call this if it gets one."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(not frozen)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Do what DDP would do in the next forward pass, which not all ranks may have."""
    model.reducer._rebuild_buckets()


def share_buffers(model: DistributedDataParallel, source: int) -> None:
    """Hand out this rank's buffers, if DDP would hand out those of rank 0 in the next forward pass."""
    if not model.will_sync_module_buffers() or hasattr(model, "buffer_hook"):
        return
    if source == 0:
        model._sync_buffers()
    else:
        ignored = getattr(model, "parameters_to_ignore", ())
        for name, buffer in model.module.named_buffers():
            if name not in ignored:
                dist.broadcast(buffer, group=model.process_group, group_src=source)
    model.require_forward_param_sync = False


def joins(model: DistributedDataParallel) -> bool:
    """Whether this is inside of `model.join()`."""
    return model._join_config.enable


def drop_static_graph(model: DistributedDataParallel) -> None:
    """Build DDP's reducer again, without `static_graph`."""
    model.static_graph = model.find_unused_parameters = False
    model._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    model._ddp_init_helper(parameters, sparse, model._build_debug_param_to_name_mapping(parameters), False)
    for hook, state in communication_hooks(model):
        dist._register_comm_hook(model.reducer, state, hook)
