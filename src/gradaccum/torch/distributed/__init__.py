"""Several ranks: reductions are held back to the window's end, and weights are added up."""

from gradaccum.torch.distributed.by_blocks import ByBlocks
from gradaccum.torch.distributed.channel import Channel, Kind
from gradaccum.torch.distributed.detect import check_detected, check_flattened, detect_ranks, leaving_on_error
from gradaccum.torch.distributed.single_rank import Listener, Meeting, Settings, SingleRank, Total, by_rank
from gradaccum.torch.distributed.together import run_by_blocks, run_together

__all__ = [
    "ByBlocks",
    "Channel",
    "Kind",
    "Listener",
    "Meeting",
    "Settings",
    "SingleRank",
    "Total",
    "by_rank",
    "check_detected",
    "check_flattened",
    "detect_ranks",
    "leaving_on_error",
    "run_by_blocks",
    "run_together",
]
