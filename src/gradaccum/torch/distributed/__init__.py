"""Several ranks: reductions are held back to the window's end, and weights are added up."""

from gradaccum.torch.distributed.detect import check_detected, detect_ranks
from gradaccum.torch.distributed.single_rank import Listener, SingleRank, Total

__all__ = ["Listener", "SingleRank", "Total", "check_detected", "detect_ranks"]
