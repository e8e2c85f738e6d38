"""Distributed training (DDP, FSDP2): one reduction per window, weighed over all ranks.

An `Engine` holds a model's own reduction back to the window's end, lets it happen or brings it about: `Replicas` that
of DistributedDataParallel, `Shards` that of FSDP2. `Ranks` closes the windows of all ranks together: each rank sends a
few numbers over a `Channel`, that it comes to the reduction and what its part of the window weighs, and reads the
others' before it waits for them in a collective. A rank that is elsewhere, has raised or died is named by what it has
sent, or by its closed connection. `detect_ranks` builds all of this from the user's model.
"""

from gradaccum.torch.distributed.channel import Channel, Kind, Settings, by_rank
from gradaccum.torch.distributed.detect import check_closures, check_detected, detect_ranks, leaving_on_error
from gradaccum.torch.distributed.fsdp import run_together
from gradaccum.torch.distributed.ranks import Listener, Ranks, Total

__all__ = [
    "Channel",
    "Kind",
    "Listener",
    "Ranks",
    "Settings",
    "Total",
    "by_rank",
    "check_closures",
    "check_detected",
    "detect_ranks",
    "leaving_on_error",
    "run_together",
]
