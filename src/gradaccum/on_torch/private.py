"""What is used of torch beyond its public API: each name, what for, and how it goes on without it.

`NAMES` lists them all, and `missing` says which of them another version of torch lacks. The internals of
DistributedDataParallel, of FSDP2 and of the autograd engine are touched in this module alone; names that much other
code relies on, such as `Tensor._version`, are used where they are needed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.extras import PrivateName

__all__ = [
    "NAMES",
    "ShardedGroup",
    "accumulates",
    "after_backward",
    "backward_engine",
    "communication_hooks",
    "current_backward",
    "default_store",
    "drop_static_graph",
    "finish_sharded_backward",
    "global_step_hooks",
    "hides_parameters",
    "joins",
    "leaves_of",
    "mark_ready",
    "missing",
    "own_sharded_groups",
    "pass_for_parameter",
    "prepare_next_forward",
    "queue_callback",
    "run_backward",
    "sharded_groups",
    "timeout_of",
    "without_global_step_hooks",
]


NAMES: tuple[PrivateName, ...] = (
    PrivateName(
        "torch", "autograd.graph._engine_run_backward", "starts a backward pass at once", "torch.autograd.backward"
    ),
    PrivateName("torch", "_C._current_graph_task_id", "counts backward passes", "no micro-batch is ever repeated"),
    PrivateName("torch", "autograd.Variable._execution_engine.queue_callback", "runs at the end of a backward pass"),
    PrivateName("torch", "_C._will_engine_execute_node", "tells torch.autograd.grad from backward()", "taken for one"),
    PrivateName("torch", "nn.parameter._ParameterMeta", "reads a tensor's `_is_param`", "hooks see parts of gradients"),
    PrivateName("torch", "_foreach_mul_", "one kernel for many gradients; documented as a beta"),
    PrivateName("torch", "_foreach_div_", "the same"),
    PrivateName("torch", "_foreach_norm", "the same"),
    PrivateName("torch", "_foreach_copy_", "the same"),
    PrivateName("torch", "_subclasses.fake_tensor.FakeTensorMode", "runs a model without memory, to size batches"),
    PrivateName("torch", "utils._python_dispatch.TorchDispatchMode", "sees every operation; documented for extensions"),
    PrivateName("torch", "nn.modules.batchnorm._BatchNorm", "what all BatchNorm layers have in common"),
    PrivateName("torch", "_dynamo", "whether a module is compiled"),
    PrivateName("torch", "nn.utils.parametrize._cache_enabled", "weights cached without a graph have no gradient"),
    PrivateName(
        "torch", "_C._functorch.maybe_current_level", "a transform of torch.func around two passes is an error"
    ),
    PrivateName("torch", "utils.weak.TensorWeakRef", "finds tensors that a chunked module lets out by the side"),
    PrivateName("torch", "utils._pytree.tree_iter", "tensors nested in any container"),
    PrivateName("tensor", "_version", "notices edits in place; documented with autograd's checks"),
    PrivateName("tensor", "_is_view", "a view shares its version with others"),
    PrivateName("operator", "_schema", "the arguments of an operator, by name"),
    PrivateName("module", "_parameters", "a module's own parameters, where they are kept"),
    PrivateName("module", "_buffers", "a module's own buffers, where they are kept"),
    PrivateName("module", "_modules", "a module's own submodules, where they are kept"),
    PrivateName("module", "_non_persistent_buffers_set", "a chunked module shares its module's state"),
    PrivateName("module", "_forward_pre_hooks", "a chunked module's second pass has the hooks of the first"),
    PrivateName("module", "_forward_hooks", "the same"),
    PrivateName("module", "_backward_pre_hooks", "hooks on a BatchNorm layer, which is cut out, are an error"),
    PrivateName("module", "_backward_hooks", "the same"),
    PrivateName("module", "_apply", "a chunked module moves as its module does"),
    PrivateName("module", "_load_from_state_dict", "a chunked module loads as its module does"),
    PrivateName("optimizer", "_step_supports_amp_scaling", "GradScaler hands its scale over"),
    PrivateName("optimizer", "_optimizer_step_pre_hooks", "hooks run once per update"),
    PrivateName("optimizer", "_optimizer_step_post_hooks", "the same"),
    PrivateName("torch.optim.optimizer", "_global_optimizer_pre_hooks", "they run once, and see the wrapper"),
    PrivateName("torch.optim.optimizer", "_global_optimizer_post_hooks", "the same"),
    PrivateName("optimizer", "_optimizer_state_dict_pre_hooks", "hooks of state_dict() see the wrapper"),
    PrivateName("optimizer", "_optimizer_state_dict_post_hooks", "the same"),
    PrivateName("optimizer", "_optimizer_load_state_dict_pre_hooks", "the same"),
    PrivateName("optimizer", "_optimizer_load_state_dict_post_hooks", "the same"),
    PrivateName(
        "torch",
        "distributed.distributed_c10d._get_default_store",
        "a rank tells the others that it has failed to start",
    ),
    PrivateName("group", "_get_backend", "a process group's timeout", "torch's default of half an hour"),
    PrivateName("ddp", "_comm_hooks", "whether a communication hook is registered", "none is assumed"),
    PrivateName("ddp", "_join_config", "model.join() is refused", "it hangs"),
    PrivateName("ddp", "_sync_buffers", "buffers are broadcast once per window", "torch.distributed.broadcast"),
    PrivateName("reducer", "_rebuild_buckets", "buckets are in the same order on all ranks", "DDP's next forward pass"),
    PrivateName("reducer", "_autograd_hook", "DDP reduces outside of a backward pass", "torch.distributed.all_reduce"),
    PrivateName("ddp", "_remove_autograd_hooks", "a reducer without static_graph takes the place of one with it"),
    PrivateName("ddp", "_build_params_for_reducer", "the same"),
    PrivateName("ddp", "_ddp_init_helper", "the same"),
    PrivateName("ddp", "_build_debug_param_to_name_mapping", "the same"),
    PrivateName("torch", "distributed._register_comm_hook", "the same"),
    PrivateName("fsdp", "_get_fsdp_state", "the groups of parameters that FSDP2 gathers together"),
    PrivateName("fsdp state", "_fsdp_param_groups", "the same"),
    PrivateName("fsdp state", "_root_post_backward_final_callback", "FSDP2 reduces outside of a backward pass"),
    PrivateName("fsdp group", "_partial_reduce_output", "what HSDP has not reduced across replicas yet"),
    PrivateName("fsdp group", "fsdp_params", "the parameters of a group"),
    PrivateName("fsdp group", "mesh_info", "the devices of a group"),
    PrivateName("fsdp state", "_lazy_init", "a restored window is reduced before a forward pass"),
    PrivateName("fsdp parameter", "sharded_param", "whether it is trained"),
    PrivateName("fsdp parameter", "_unsharded_param", "the gathered parameter, where autograd leaves its gradient"),
    PrivateName("fsdp parameter", "unsharded_accumulated_grad", "what an open window has added up in reduce_dtype"),
    PrivateName("fsdp parameter", "reduce_dtype", "the same"),
)


def missing(samples: Mapping[str, object]) -> list[str]:
    """Which private names this version of torch lacks, each in a sentence.

    Args:
        samples: An object for each kind of owner.
    """
    found = (name.missing_from(samples[name.owner], f"torch {torch.__version__}") for name in NAMES)
    return [sentence for sentence in found if sentence is not None]


# Optimizers.

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def global_step_hooks() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The hooks of every optimizer's step, before and after it."""
    module = sys.modules["torch.optim.optimizer"]  # torch.optim hides it
    return getattr(module, _GLOBAL_HOOKS[0], {}), getattr(module, _GLOBAL_HOOKS[1], {})


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[tuple[list[Any], list[Any]]]:
    """The hooks of every optimizer's step, before and after it; meanwhile no optimizer calls them by itself."""
    module, found = sys.modules["torch.optim.optimizer"], global_step_hooks()
    for name, table in zip(_GLOBAL_HOOKS, found, strict=True):
        if table:
            setattr(module, name, type(table)())
    try:
        yield [*found[0].values()], [*found[1].values()]
    finally:
        for name, table in zip(_GLOBAL_HOOKS, found, strict=True):
            if table:
                setattr(module, name, table)


# The autograd engine.


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor], retain_graph: bool = False) -> None:
    """`torch.autograd.backward(tensors, gradients)`, where the gradients are known to fit.

    What torch looks at first, once more for each micro-batch, takes as long as the backward pass of a small layer.

    Args:
        tensors: Where to start.
        gradients: Of each of them, of its shape and dtype, on its device.
        retain_graph: As for `torch.autograd.backward`.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> run_backward([weight * 2], [torch.tensor([1.0, 2.0, 3.0])])
        >>> weight.grad
        tensor([2., 4., 6.])
    """
    engine = backward_engine()
    if engine is None or any([type(tensor) is not Tensor for tensor in tensors]):
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
    else:
        engine(tuple(tensors), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


@functools.cache
def backward_engine() -> Callable[..., Any] | None:
    """What `torch.autograd.backward` calls in the end; None where a trial shows that it is another than expected."""
    try:
        from torch.autograd.graph import _engine_run_backward as engine

        leaf = torch.ones((), requires_grad=True, device="cpu")
        with torch.enable_grad():
            end = leaf * 2
        engine((end,), (torch.full_like(end, 3.0),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return engine if leaf.grad is not None and leaf.grad.item() == 6.0 else None
    except Exception:
        return None


def after_backward(callback: Callable[[], None]) -> None:
    """In a backward pass: call this at its end, after what DDP and FSDP2 have queued by then."""
    queue_callback(lambda: queue_callback(callback))  # DDP queues its own when its last bucket is full


def queue_callback(callback: Callable[[], None]) -> None:
    """In a backward pass: call this at its end, if it comes to one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def pass_for_parameter(tensor: Tensor) -> None:
    """Have `isinstance(tensor, torch.nn.Parameter)` say yes."""
    tensor._is_param = True


def accumulates(parameters: Sequence[Tensor]) -> bool:
    """In a backward pass: whether it adds to any of these gradients. `torch.autograd.grad` does not."""
    executes = getattr(torch._C, "_will_engine_execute_node", None)
    if executes is None:
        return True
    for parameter in parameters:
        if parameter.requires_grad:
            try:
                if executes(torch.autograd.graph.get_gradient_edge(parameter).node):
                    return True
            except RuntimeError:  # torch.autograd.grad(loss, parameters) captures this gradient
                return False
    return False


def hides_parameters(output: Tensor) -> bool:
    """Whether reentrant checkpointing runs backward passes of its own inside of the one from this output."""
    return any(node.name() == "CheckpointFunctionBackward" for node in _graph_of(output))


def leaves_of(output: Tensor) -> set[int]:
    """The ids of the leaves that a backward pass from this output would reach."""
    return {id(getattr(node, "variable", None)) for node in _graph_of(output)}


def _graph_of(output: Tensor) -> Iterator[Any]:
    waiting, seen = [output.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


def current_backward() -> int | None:
    """A number for the backward pass that is running; None if it cannot be told."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return None if number is None else number()


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
