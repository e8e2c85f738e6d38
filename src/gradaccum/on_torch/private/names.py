"""The list of what is used of torch beyond its public API."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradaccum.extras import PrivateName

# Owner | names | what they are used for | how it goes on without them, if it can
_TABLE = """
torch | autograd.graph._engine_run_backward | starts a backward pass at once | torch.autograd.backward
torch | _C._current_graph_task_id | counts backward passes | no micro-batch is ever repeated
torch | autograd.Variable._execution_engine.queue_callback | runs at the end of a backward pass
torch | nn.parameter._ParameterMeta | reads a tensor's `_is_param` | hooks see parts of gradients
torch | _foreach_mul_ _foreach_div_ _foreach_norm _foreach_copy_ | one kernel for many gradients; documented as a beta
torch | _foreach_max _foreach_clamp_min_ _foreach_clamp_max_ | one kernel for many gradients; documented as a beta
torch | _C._autograd._get_sequence_nr | distinguishes forward passes | several passes are logged at INFO
torch | _subclasses.fake_tensor.FakeTensorMode | runs a model without memory, to size batches
torch | utils._python_dispatch.TorchDispatchMode | sees every operation; documented for extensions
torch | nn.modules.batchnorm._BatchNorm | what all BatchNorm layers have in common
torch | _dynamo | whether a module is compiled
torch | _dynamo.trace_rules.add | torch.compile of a whole step traces nothing of a window
torch | _dynamo.config.trace_autograd_ops _dynamo.config.patch | compiled windows have both passes | no compile=
torch | _dynamo.exc.Unsupported _dynamo.exc.TorchDynamoException | what can't be traced is refused with the reason
torch | _dynamo.exc.FailOnRecompileLimitHit | a window that is compiled again and again runs eagerly
torch | _dynamo.maybe_mark_dynamic _dynamo.mark_static_address | sizes that vary; memory that CUDA graphs write to
torch | _inductor.list_mode_options | modes of torch.compile beside options
torch | _inductor.exc.InvalidCxxCompiler | a missing compiler is named
tensor | _backward_hooks _post_accumulate_grad_hooks | hooks that a compiled window would leave out are refused
torch | nn.utils.parametrize._cache_enabled | weights cached without a graph have no gradient
torch | _C._functorch.maybe_current_level | a transform of torch.func around two passes is an error
torch | utils.weak.TensorWeakRef | finds tensors that leave a chunked module outside its outputs
torch | Generator._cdata | whether two objects are the same generator | each is one of its own
torch | utils._pytree.tree_iter | tensors nested in any container
node | _input_metadata | zeros to go backward, so that what weighs nothing leaves the rows of a sparse gradient
tensor | _version | notices edits in place; documented with autograd's checks
tensor | _backward_hooks _post_accumulate_grad_hooks | hooks that step an optimizer are refused | nothing is said
tensor | _is_view | a view shares its version with others
operator | _schema | the arguments of an operator, by name
module | _parameters | a module's own parameters, where they are kept
module | _buffers | a module's own buffers, where they are kept
module | _modules | a module's own submodules, where they are kept
module | _non_persistent_buffers_set | a chunked module shares its module's state
module | _forward_pre_hooks _forward_hooks | a chunked module's second pass has the hooks of the first
module | _backward_pre_hooks _backward_hooks | hooks on a BatchNorm layer, which is cut out, are an error
module | _apply | a chunked module moves as its module does
module | _load_from_state_dict | a chunked module loads as its module does
optimizer | _step_supports_amp_scaling | GradScaler hands its scale over
optimizer | _optimizer_step_pre_hooks _optimizer_step_post_hooks | hooks run once per update
torch.optim.optimizer | _global_optimizer_pre_hooks _global_optimizer_post_hooks | they run once, and see the wrapper
optimizer | _optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks | hooks of state_dict() see the wrapper
optimizer | _optimizer_load_state_dict_pre_hooks | hooks of state_dict() see the wrapper
optimizer | _optimizer_load_state_dict_post_hooks | hooks of state_dict() see the wrapper
group | _get_backend | a gloo group beside another one has its timeout | torch's default
ddp | _comm_hooks | whether a communication hook is registered
ddp | _join_config | model.join() is refused
ddp | _check_reducer_finalized | a window that DDP has reduced in part is an error
ddp | _get_ddp_logging_data | whether parameters were frozen after DDP wrapped them, or reduced before
reducer | _get_zeros_like_grad_buckets | which parameters DDP reduces, and which first
ddp | _sync_buffers | buffers are broadcast once per window
reducer | _rebuild_buckets | buckets are in the same order on all ranks
reducer | _autograd_hook | DDP reduces outside of a backward pass | torch.distributed.all_reduce
ddp | _remove_autograd_hooks _build_params_for_reducer | a reducer without static_graph takes the place of one with it
ddp | _ddp_init_helper | a reducer without static_graph takes the place of one with it
ddp | _build_debug_param_to_name_mapping | a reducer without static_graph takes the place of one with it
torch | distributed._register_comm_hook | a reducer without static_graph takes the place of one with it
fsdp | _get_fsdp_state | the groups of parameters that FSDP2 gathers together
fsdp state | _fsdp_param_groups | the groups of parameters that FSDP2 gathers together
fsdp state | _root_post_backward_final_callback | FSDP2 reduces outside of a backward pass
fsdp state | _state_ctx | from torch 2.15 on, who ends a backward pass | nobody else does
fsdp group | _partial_reduce_output | what HSDP has not reduced across replicas yet
fsdp group | fsdp_params | the parameters of a group
fsdp group | mesh_info | the devices of a group
fsdp state | _lazy_init | a restored window is reduced before a forward pass
fsdp parameter | sharded_param | whether it is trained
fsdp parameter | _unsharded_param | the gathered parameter, where autograd leaves its gradient
fsdp parameter | unsharded_accumulated_grad reduce_dtype | what an open window has added up in reduce_dtype
fsdp group | reduce_scatter_unused_params | zeros are reduced in the dtype of the other sums
fsdp group | _all_gather_comm | every rank is asked before parameters are gathered
fsdp group | _reduce_scatter_comm | the same before gradients are reduced
fsdp group | reshard | a head whose logits come in tiles stays gathered until its backward pass
fsdp group | post_backward reduce_grads | sums in reduce_dtype are reduced with gradients that came to no sum
fsdp state | _mp_policy | logits in tiles are not cast as outputs are
fsdp parameter | mp_policy | in which dtype parameters are gathered
fsdp state | _training_state | a forward pass on fake tensors gathers nothing
fsdp state | _modules_to_run_forward | the same, where modules are sharded together
fsdp | reset_iter_state | passes run again after memory ran out
"""

NAMES = tuple(
    PrivateName(owner, name, *why)
    for owner, names, *why in (line.split(" | ") for line in _TABLE.strip().splitlines())
    for name in names.split()
)


def missing(samples: Mapping[str, object]) -> list[str]:
    """Which private names this version of torch lacks, each in a sentence."""
    here = (name for name in NAMES if name.owner in samples)
    found = (name.missing_from(samples[name.owner], f"torch {torch.__version__}") for name in here)
    return [sentence for sentence in found if sentence is not None]
