"""The list of what is used of torch beyond its public API."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradaccum.extras import PrivateName

__all__ = ["NAMES", "missing"]


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
    PrivateName("torch", "_foreach_max", "the same"),
    PrivateName("torch", "_foreach_clamp_min_", "the same"),
    PrivateName("torch", "_foreach_clamp_max_", "the same"),
    PrivateName(
        "torch", "_C._autograd._get_sequence_nr", "tells forward passes apart", "several passes are said at INFO"
    ),
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
    PrivateName("fsdp state", "_fsdp_param_groups", "the same", "fully_shard is refused"),
    PrivateName("fsdp state", "_root_post_backward_final_callback", "FSDP2 reduces outside of a backward pass"),
    PrivateName("fsdp state", "_state_ctx", "from torch 2.15 on, who ends a backward pass", "nobody else does"),
    PrivateName("fsdp group", "_partial_reduce_output", "what HSDP has not reduced across replicas yet"),
    PrivateName("fsdp group", "fsdp_params", "the parameters of a group"),
    PrivateName("fsdp group", "mesh_info", "the devices of a group"),
    PrivateName("fsdp state", "_lazy_init", "a restored window is reduced before a forward pass"),
    PrivateName("fsdp parameter", "sharded_param", "whether it is trained"),
    PrivateName("fsdp parameter", "_unsharded_param", "the gathered parameter, where autograd leaves its gradient"),
    PrivateName("fsdp parameter", "unsharded_accumulated_grad", "what an open window has added up in reduce_dtype"),
    PrivateName("fsdp parameter", "reduce_dtype", "the same"),
    PrivateName("fsdp group", "reduce_scatter_unused_params", "zeros are reduced in the dtype of the sums beside them"),
    PrivateName("fsdp group", "_all_gather_comm", "every rank is asked before parameters are gathered"),
    PrivateName("fsdp group", "_reduce_scatter_comm", "the same before gradients are reduced"),
    PrivateName("fsdp group", "reshard", "a head whose logits come in tiles stays gathered until its backward pass"),
    PrivateName("fsdp group", "unshard", "a block's parameters are gathered once for all micro-batches"),
    PrivateName("fsdp group", "wait_for_unshard", "the same"),
    PrivateName("fsdp group", "post_backward", "a block's gradients are added up, and reduced once"),
    PrivateName("fsdp group", "reduce_grads", "the same"),
    PrivateName("fsdp group", "all_reduce_grads", "the same"),
    PrivateName("fsdp group", "reshard_after_backward", "the same"),
    PrivateName("fsdp group", "finalize_backward", "a block is updated when its gradients have been reduced"),
    PrivateName("fsdp group", "post_forward_mesh_info", "whether parameters stay gathered until backward"),
    PrivateName("fsdp state", "_mp_policy", "logits in tiles are not cast as outputs are"),
    PrivateName("fsdp parameter", "mp_policy", "in which dtype parameters are gathered"),
    PrivateName("fsdp state", "_training_state", "a forward pass on fake tensors gathers nothing"),
    PrivateName("fsdp state", "_modules_to_run_forward", "the same, where modules are sharded together"),
    PrivateName("fsdp", "reset_iter_state", "passes run again after memory ran out", "fully_shard is refused"),
)


def missing(samples: Mapping[str, object]) -> list[str]:
    """Which private names this version of torch lacks, each in a sentence."""
    here = (name for name in NAMES if name.owner in samples)
    found = (name.missing_from(samples[name.owner], f"torch {torch.__version__}") for name in here)
    return [sentence for sentence in found if sentence is not None]
