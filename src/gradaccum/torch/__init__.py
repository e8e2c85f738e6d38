"""gradaccum for PyTorch."""

from gradaccum.extras import require

require("torch")

from typing import TYPE_CHECKING

from gradaccum.lazy import when_used

if TYPE_CHECKING:
    from gradaccum.torch import losses, optim, packing
    from gradaccum.torch.buffers import combine_buffers
    from gradaccum.torch.check import check_equivalence
    from gradaccum.torch.chunking import chunked
    from gradaccum.torch.measure import Recorder, suggest_micro_batch_size
    from gradaccum.torch.train_step import TrainStep
else:
    # Importing a module makes it its package's attribute. This one, whose name is to be the class's, is imported now,
    # when that does no harm, and not when an old pickle asks for it.
    from gradaccum.torch import chunked

    del chunked
    __getattr__, __dir__ = when_used(
        __name__,
        {
            "Recorder": "gradaccum.torch.measure",
            "TrainStep": "gradaccum.torch.train_step",
            "check_equivalence": "gradaccum.torch.check",
            "chunked": "gradaccum.torch.chunking",
            "combine_buffers": "gradaccum.torch.buffers",
            "losses": "gradaccum.torch.losses",
            "optim": "gradaccum.torch.optim",
            "packing": "gradaccum.torch.packing",
            "suggest_micro_batch_size": "gradaccum.torch.measure",
        },
    )

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
