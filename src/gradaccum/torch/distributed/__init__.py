"""Distributed training (DDP, FSDP2): one reduction per window, weighed over all ranks."""

from gradaccum.torch.distributed.by_blocks import ByBlocks
from gradaccum.torch.distributed.channel import Channel, Kind
from gradaccum.torch.distributed.detect import check_closures, check_detected, detect_ranks, leaving_on_error
from gradaccum.torch.distributed.single_rank import SUMS, Listener, Meeting, Settings, SingleRank, Total, by_rank
from gradaccum.torch.distributed.together import run_by_blocks, run_together

__all__ = [
    "SUMS",
    "ByBlocks",
    "Channel",
    "Kind",
    "Listener",
    "Meeting",
    "Settings",
    "SingleRank",
    "Total",
    "by_rank",
    "check_closures",
    "check_detected",
    "detect_ranks",
    "leaving_on_error",
    "run_by_blocks",
    "run_together",
]
