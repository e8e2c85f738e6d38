"""The large batch's update in PyTorch, in the memory of a micro-batch.

- `optim`: wrap the optimizer, in a loop that runs small batches.
- `TrainStep`: split the batch, if the loader yields the large one.
- `BlockStep`: the same layer by layer, if gradients or parameters don't fit either.
- `chunked`: chunk the model, if the loss looks across the batch; `losses` has such losses in tiles.
- `check_equivalence`: whether micro-batches make the large batch's update, and if not, why.
- `suggest_micro_batch_size`: which size fits, without the device.
"""

from gradaccum.extras import require

require("torch")

from typing import TYPE_CHECKING

from gradaccum.lazy import when_used

if TYPE_CHECKING:
    from gradaccum.torch import losses, optim, packing
    from gradaccum.torch.buffers import combine_buffers
    from gradaccum.torch.check import check_equivalence
    from gradaccum.torch.chunking import chunked
    from gradaccum.torch.layers import BlockStep
    from gradaccum.torch.measure import Recorder, suggest_micro_batch_size
    from gradaccum.torch.reproducible import GlobalBatchSampler
    from gradaccum.torch.train_step import TrainStep
else:
    # Importing a module makes it its package's attribute. This one, whose name is to be the class's, is imported now,
    # when that does no harm, and not when an old pickle asks for it.
    from gradaccum.torch import chunked

    del chunked
    __getattr__, __dir__ = when_used(
        __name__,
        {
            "BlockStep": "gradaccum.torch.layers",
            "GlobalBatchSampler": "gradaccum.torch.reproducible",
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
        {
            "Blocks": "It is gradaccum.torch.BlockStep, a class of its own.",
            "Optimizer": "It is gradaccum.torch.optim.Optimizer.",
            "info_nce": "It is gradaccum.torch.losses.info_nce.",
        },
    )

__all__ = [
    "BlockStep",
    "GlobalBatchSampler",
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
