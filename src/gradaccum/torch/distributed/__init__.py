"""Several ranks: reductions are held back to the window's end, and weights are added up."""

from gradaccum.torch.distributed.detect import check_detected, detect_ranks, leaving_on_error
from gradaccum.torch.distributed.fsdp import check_flattened
from gradaccum.torch.distributed.single_rank import Listener, SingleRank, Total
from gradaccum.torch.distributed.together import run_together

__all__ = [
    "Listener",
    "SingleRank",
    "Total",
    "check_detected",
    "check_flattened",
    "detect_ranks",
    "leaving_on_error",
    "run_together",
]
