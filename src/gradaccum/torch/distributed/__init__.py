"""Distributed training (DDP, FSDP2): one reduction per window, weighed over all ranks.

An `Engine` holds a model's own reduction back to the window's end, lets it happen or brings it about: `Replicas` that
of DistributedDataParallel, `Shards` that of FSDP2. `Ranks` closes the windows of all ranks together: each rank sends a
few numbers over a `Channel`, in one collective of torch.distributed: that it comes to the reduction, and what its part
of the window weighs. A rank that raises or dies is the process group's error. `detect_ranks` builds all of this from
the user's model.
"""

from gradaccum.torch.distributed.buffers import take_over
from gradaccum.torch.distributed.channel import Channel
from gradaccum.torch.distributed.detect import check_closures, check_detected, detect_ranks
from gradaccum.torch.distributed.fsdp import run_together
from gradaccum.torch.distributed.messages import Total
from gradaccum.torch.distributed.ranks import Listener, Ranks
from gradaccum.torch.distributed.settings import Settings, by_rank

__all__ = [
    "Channel",
    "Listener",
    "Ranks",
    "Settings",
    "Total",
    "by_rank",
    "check_closures",
    "check_detected",
    "detect_ranks",
    "run_together",
    "take_over",
]
