"""gradaccum for PyTorch."""

from gradaccum.extras import require

require("torch")

from gradaccum.torch import chunked as _  # noqa: F401  # the module first: its name is to be the class's
from gradaccum.torch import losses, optim, packing
from gradaccum.torch.buffers import combine_buffers
from gradaccum.torch.check import check_equivalence
from gradaccum.torch.chunking import chunked
from gradaccum.torch.measure import Recorder, suggest_micro_batch_size
from gradaccum.torch.train_step import TrainStep

__all__ = [
    "Recorder",
    "TrainStep",
    "check_equivalence",
    "chunked",
    "combine_buffers",
    "losses",
    "optim",
    "packing",
    "suggest_micro_batch_size",
]
