"""The largest micro-batch of a sharded model, predicted by each rank alone: other ranks would wait if it were tried."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from gradaccum.core.sizes import MARGIN, format_bytes, largest_size
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import MemoryMeter, local_part
from gradaccum.torch.distributed import Ranks
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import micro_batch_peak, optimizer_bytes

__all__ = ["largest_fitting"]

logger = logging.getLogger("gradaccum")


def largest_fitting(
    objective: Objective,
    gauge: MemoryMeter,
    optimizers: Sequence[torch.optim.Optimizer],
    ranks: Ranks,
    batch: Batch,
) -> int:
    """The largest micro-batch of this batch that fits on this rank, estimated with fake tensors.

    in use now + optimizer state to come + gathered parameters + gradients + activations(rows)   <=   0.9 * limit
    """
    assert ranks.together is not None, "only ranks of a sharded model would wait"
    limit, shards = gauge.limit(), ranks.together.shards
    if limit is None:
        return batch.rows
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    to_come = sum(optimizer_bytes(o, [local_part(p) for group in o.param_groups for p in group["params"]]) for o in new)
    with shards.alone() as gathered:
        dtypes = dict(gathered)
        gradients = sum(p.numel() * dtype.itemsize for p, dtype in dtypes.items() if p.requires_grad)
        constant = gauge.live() + to_come + shards.gathered_bytes(gradients) - gradients

        def peak(rows: int) -> int:
            return constant + micro_batch_peak(objective, batch, rows, gathered=dtypes)

        try:
            size, needed = largest_size(peak, batch.rows, (1 - MARGIN) * limit)
        except Exception as error:
            raise ValueError(
                "micro_batch_size='auto' predicts by fake tensors what a sharded model's micro-batches need, since "
                "trying them out would have other ranks wait, and this model or loss can't run on them: "
                f"{error}. Give a number of rows."
            ) from error
    logger.info(
        "micro_batch_size='auto': %d of %d rows, which are predicted to take %s at most, of %s.",
        size,
        batch.rows,
        format_bytes(int(needed)),
        format_bytes(int(limit)),
    )
    return size
