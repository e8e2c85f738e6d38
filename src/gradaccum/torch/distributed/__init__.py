"""Distributed training (DDP, FSDP2): one reduction per window, weighed over all ranks."""

from gradaccum.torch.distributed.channel import Channel, Kind, Settings, by_rank
from gradaccum.torch.distributed.detect import check_closures, check_detected, detect_ranks, leaving_on_error
from gradaccum.torch.distributed.fsdp import ByBlocks, run_by_blocks, run_together
from gradaccum.torch.distributed.ranks import Listener, Ranks, Total

__all__ = [
    "ByBlocks",
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
    "run_by_blocks",
    "run_together",
]
