"""What is used of process groups, DistributedDataParallel and FSDP2 beyond their public API."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.on_torch.private.autograd import run_backward


def timeout_of(group: Any) -> timedelta | None:
    """How long this process group waits; None where it doesn't say."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found = group._get_backend(torch.device(device)).options._timeout
            if isinstance(found, timedelta):
                return found
    return None


# DistributedDataParallel.


def communication_hooks(model: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """The registered communication hooks, each with its state."""
    return model._comm_hooks


def reduction_by_hand(model: DistributedDataParallel, parameters: int) -> Callable[[], None]:
    """Has DDP reduce what is in `p.grad` as if a backward pass had just added nothing to so many parameters.

    They become ready in the opposite order of their use, as in a backward pass: DDP makes its buckets by the first one.
    """
    leaf, reducer = torch.zeros((), device=model.device, requires_grad=True), cast(Any, model.reducer)
    leaf.register_hook(lambda _: [reducer._autograd_hook(index) for index in reversed(range(parameters))] and None)
    ends, nothing = [leaf], [torch.zeros_like(leaf, requires_grad=False)]

    def reduce() -> None:
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        run_backward(ends, nothing)

    return reduce


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


def rebuild_buckets(model: DistributedDataParallel) -> bool:
    """Do what DDP would do in the next forward pass, which not all ranks may have. Returns whether buckets changed."""
    return bool(model.reducer._rebuild_buckets())


def of_first_bucket(model: DistributedDataParallel, parameters: Sequence[Tensor], *, look: bool = False) -> Tensor:
    """One of these parameters, without whose gradient DDP reduces none: a late one, whose gradient comes early."""
    alike = len({(p.dtype, p.device) for p in parameters}) == 1
    if alike and not look and not model._get_ddp_logging_data().get("has_rebuilt_buckets", 1):
        return parameters[-1]  # its buckets are in the opposite order of the parameters
    inside = {*model.reducer._get_zeros_like_grad_buckets()[0].parameters()}
    return next(p for p in reversed(parameters) if p in inside)


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


# FSDP2; each name is in `names.NAMES`.


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
            own = None if _sums_in_the_gradient(parameter) else parameter.unsharded_accumulated_grad
            found += [own, getattr(_whole(parameter), "grad", None)]
        return [tensor for tensor in found if tensor is not None]

    def gathered_bytes(self) -> tuple[int, int]:
        """Of its whole parameters, as they are gathered, and of their gradients, as they are reduced."""
        sizes = [0, 0]
        for parameter in self._group.fsdp_params:
            own, policy = parameter.sharded_param, parameter.mp_policy
            sizes[0] += own.numel() * (policy.param_dtype or own.dtype).itemsize
            if own.requires_grad:
                sizes[1] += own.numel() * (policy.reduce_dtype or policy.param_dtype or own.dtype).itemsize
        return sizes[0], sizes[1]

    def gathered_dtypes(self) -> dict[Tensor, torch.dtype]:
        """In which dtype parameters are gathered."""
        return {p.sharded_param: p.mp_policy.param_dtype or p.sharded_param.dtype for p in self._group.fsdp_params}

    def ask_before(self, ask: Callable[[str], object] | None, name: str) -> None:
        """Call this before each of its collectives, with what is to begin; None: no more."""
        for way in ("_all_gather_comm", "_reduce_scatter_comm"):
            found = getattr(self._group, way)
            own = found.own if isinstance(found, _Asking) else found
            setattr(self._group, way, own if ask is None else _Asking(own, functools.partial(ask, f"{name} {way}")))

    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer knows: this rank's shards."""
        return [p.sharded_param for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    def watch(self, arrives: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        """Pass each gradient through this function, with its parameter, before it joins the sum."""
        for parameter, whole in _gathered(self._group):
            if whole.requires_grad and whole not in self._watched:
                self._watched[whole] = whole.register_hook(functools.partial(arrives, parameter.sharded_param))

    def reduce_in_one_dtype(self) -> None:
        """Have FSDP2 reduce sums in `reduce_dtype` together with gradients that came to no sum, and with zeros.

        It keeps the latter in the dtype they arrive in, and refuses to reduce both.
        """
        if any(p.mp_policy.reduce_dtype is not None for p in self._group.fsdp_params):
            self._group.post_backward = functools.partial(_after_one_dtype, self._group)

    def ignore(self) -> None:
        """Stop watching."""
        found = vars(self._group).get("post_backward")
        if getattr(found, "func", None) is _after_one_dtype:
            del self._group.post_backward
        while self._watched:
            self._watched.popitem()[1].remove()

    def clear(self) -> None:
        """Drop what has been added up."""
        for parameter in self._group.fsdp_params:
            _put_sum(parameter, None)
            if (whole := _whole(parameter)) is not None:
                whole.grad = None
        self._group._partial_reduce_output = None

    def add_zeros_to_reduce(self) -> None:
        """HSDP's second reduction goes only with a first one: of zeros, where nothing else is left for it."""
        if self._group._partial_reduce_output is not None:
            for parameter, _ in _gathered(self._group):
                _put_zeros(parameter)


def _whole(parameter: Any) -> Tensor | None:
    """The gathered parameter, where autograd leaves its gradient; None before the first gathering."""
    return getattr(parameter, "_unsharded_param", None)


def _gathered(group: Any) -> list[tuple[Any, Tensor]]:
    """Of the parameters that are trained, those that have been gathered."""
    return [(p, w) for p in group.fsdp_params if p.sharded_param.requires_grad and (w := _whole(p)) is not None]


def _put_zeros(parameter: Any) -> None:
    whole = parameter._unsharded_param
    _put_sum(parameter, torch.zeros_like(whole, dtype=parameter.reduce_dtype or whole.dtype, requires_grad=False))


def _after_one_dtype(group: Any, *unused: Any) -> None:
    """A backward pass of a group is over: what it reduces is in the dtype of the sums, if there are any."""
    gathered = _gathered(group)
    if group.reduce_grads and any(p.unsharded_accumulated_grad is not None for p, _ in gathered):
        for parameter, whole in gathered:
            if parameter.unsharded_accumulated_grad is not None:
                continue
            if whole.grad is not None:
                gradient, whole.grad = whole.grad, None
                _put_sum(parameter, gradient.to(parameter.reduce_dtype))
            elif group.reduce_scatter_unused_params:
                _put_zeros(parameter)
    type(group).post_backward(group, *unused)


def _sums_in_the_gradient(parameter: Any) -> bool:
    """Whether what an open window has added up is the gathered parameter's gradient, as from torch 2.15 on."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _put_sum(parameter: Any, value: Tensor | None) -> None:
    if not _sums_in_the_gradient(parameter):
        parameter.unsharded_accumulated_grad = value
    elif (whole := _whole(parameter)) is not None:
        whole.grad = value


class _Asking:
    """FSDP2's way to gather or to reduce, which asks before."""

    def __init__(self, own: Any, ask: Callable[[], object]) -> None:
        self.own: Any = own
        self._ask = ask

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.own.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ask()  # after the memory for it has been found
        return self.own(*args, **kwargs)


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
    context: Any = getattr(state, "_state_ctx", None)
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = False  # torch 2.15 sets it when a backward pass begins
    state._root_post_backward_final_callback()


def start_over(modules: Iterable[Any]) -> None:
    """Forget a pass that failed: no parameter is gathered, and nothing is under way."""
    for module in modules:
        module._get_fsdp_state()._lazy_init()  # which no pass may have come to
        module.reset_iter_state()


@contextlib.contextmanager
def gathering_nothing(module: Any) -> Iterator[None]:
    """Forward passes inside gather no parameters and leave no hooks for the backward pass; dtypes are cast as ever."""
    states = {s for part in module.modules() if hasattr(part, "_get_fsdp_state") for s in [part._get_fsdp_state()]}
    kept = [(state, state._fsdp_param_groups, state._training_state) for state in states]
    try:
        for state, _, phase in kept:
            # As in the forward passes of activation checkpointing, inside of a backward pass.
            state._fsdp_param_groups, state._training_state = [], type(phase).PRE_BACKWARD
        yield
    finally:
        for state, groups, phase in kept:
            state._fsdp_param_groups, state._training_state = groups, phase
            state._modules_to_run_forward.clear()
