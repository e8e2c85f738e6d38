"""What is used of torch beyond its public API: each name, what for, and how it goes on without it.

`NAMES` lists them all, and `missing` says which of them another version of torch lacks. The internals of
DistributedDataParallel, of FSDP2 and of the autograd engine are touched in this wing alone; names that much other
code relies on, such as `Tensor._version`, are used where they are needed.
"""

from gradaccum.on_torch.private.autograd import (
    after_backward,
    current_backward,
    global_step_hooks,
    graph_of,
    leave_uncompiled,
    leaves_of,
    pass_for_parameter,
    queue_callback,
    recorded_operations,
    run_backward,
    without_global_step_hooks,
)
from gradaccum.on_torch.private.names import NAMES, missing
from gradaccum.on_torch.private.ranks import (
    ShardedGroup,
    communication_hooks,
    drop_static_graph,
    finish_sharded_backward,
    gathering_nothing,
    hook_frozen,
    is_finalized,
    joins,
    of_first_bucket,
    own_sharded_groups,
    rebuild_buckets,
    reduces_exactly,
    reduction_by_hand,
    sharded_groups,
    share_buffers,
    start_over,
    timeout_of,
)

__all__ = [
    "NAMES",
    "ShardedGroup",
    "after_backward",
    "communication_hooks",
    "current_backward",
    "drop_static_graph",
    "finish_sharded_backward",
    "gathering_nothing",
    "global_step_hooks",
    "graph_of",
    "hook_frozen",
    "is_finalized",
    "joins",
    "leave_uncompiled",
    "leaves_of",
    "missing",
    "of_first_bucket",
    "own_sharded_groups",
    "pass_for_parameter",
    "queue_callback",
    "rebuild_buckets",
    "recorded_operations",
    "reduces_exactly",
    "reduction_by_hand",
    "run_backward",
    "sharded_groups",
    "share_buffers",
    "start_over",
    "timeout_of",
    "without_global_step_hooks",
]
