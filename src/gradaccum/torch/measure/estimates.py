"""The largest micro-batch for a memory limit, without the device that has it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import MARGIN, DoesNotFit, SizeEstimate, format_bytes, largest_size, parse_bytes
from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.memory import MemoryMeter, local_part
from gradaccum.torch.distributed import Ranks
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import bytes_of, micro_batch_peak, optimizer_bytes

logger = logging.getLogger("gradaccum")

SIZE_KEYWORDS = frozenset(
    ["loss_fn", "compute_loss", "memory_limit", "optimizer", "weight", "reduction", "batch_dims", "autocast", "margin"]
)
"""What the functions below take by name."""

SMALLER = "Make the model smaller, shard it, or use gradient checkpointing or autocast=torch.bfloat16."


def suggest_micro_batch_size(model: nn.Module, batch: Any, **keywords: Any) -> int:
    """The largest micro-batch of this batch whose peak memory stays within a limit, estimated with fake tensors.

        parameters + gradients + optimizer state + batch + activations(rows)   <=   (1 - margin) * limit

    Args:
        model: The model, on any device.
        batch: The large batch, as `TrainStep` takes it: `(x, y)` for a `loss_fn`.
        keywords: Those of `estimate_size`, which returns the estimate itself.

    Returns:
        Rows, at most those of the batch.

    Raises:
        DoesNotFit: Not even one row fits; a ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
        >>> batch = torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long)
        >>> suggest_micro_batch_size(model, batch, loss_fn=nn.CrossEntropyLoss(), memory_limit="16MiB")
        1040
    """
    return estimate_size(model, batch, **keywords).micro_batch_size


def estimate_size(model: nn.Module, batch: Any, *, margin: float = MARGIN, **keywords: Any) -> SizeEstimate:
    """What `suggest_micro_batch_size` found, with its estimate and margin."""
    subject = subject_of(model, batch, margin, **keywords)
    rows, allowed = subject.batch.rows, (1 - margin) * subject.limit
    size, needed = largest_size(lambda size: subject.constant + subject.peak(size), rows, allowed)
    if needed > allowed:
        raise DoesNotFit(
            f"Not even a micro-batch of one row fits: it needs about {format_bytes(needed)}, and "
            f"{format_bytes(int(allowed))} are available ({100 * margin:.0f} % of {format_bytes(int(subject.limit))} "
            f"left free). {SMALLER}"
        )
    least = subject.constant + bytes_of(subject.trained)
    return SizeEstimate(size, rows, int(subject.limit), needed, least, margin)


def largest_fitting(
    objective: Objective, gauge: MemoryMeter, optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks, batch: Batch
) -> int:
    """The largest micro-batch of this batch that fits on this rank of a sharded model, estimated with fake tensors.

    Other ranks would wait if it were tried.

    in use now + optimizer state to come + gathered parameters + gradients + activations(rows)   <=   0.9 * limit
    """
    limit, shards = gauge.limit(), ranks.engine
    if limit is None:
        return batch.rows
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    to_come = sum(optimizer_bytes(o, [local_part(p) for group in o.param_groups for p in group["params"]]) for o in new)
    with shards.alone() as gathered:
        gradients = sum(p.numel() * dtype.itemsize for p, dtype in gathered.items() if p.requires_grad)
        constant = gauge.live() + to_come + shards.gathered_bytes(gradients) - gradients
        peak = functools.partial(micro_batch_peak, objective, batch, gathered=gathered)
        try:
            size, needed = largest_size(lambda rows: constant + peak(rows), batch.rows, (1 - MARGIN) * limit)
        except Exception as error:
            raise ValueError(
                "With a sharded model, micro_batch_size='auto' predicts memory on fake tensors, because other ranks "
                f"would wait for a trial. This model or loss can't run on fake tensors: {error}. Give a number of rows."
            ) from error
    logger.info(
        "micro_batch_size='auto': %d of %d rows, with a predicted peak of %s of %s.",
        size,
        batch.rows,
        format_bytes(int(needed)),
        format_bytes(int(limit)),
    )
    return size


class Subject(NamedTuple):
    """A model, its loss and its large batch, and the bytes that are there whatever is done."""

    objective: Objective
    batch: Batch
    limit: float
    constant: int
    trained: list[Tensor]
    optimizer: torch.optim.Optimizer | None

    def peak(self, size: int) -> int:
        """Bytes of an update beyond what is there, in micro-batches of this size."""
        return micro_batch_peak(self.objective, self.batch, size, 1 if size == self.batch.rows else 2)


def subject_of(
    model: nn.Module,
    batch: Any,
    margin: float,
    *,
    memory_limit: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **loss: Any,
) -> Subject:
    """What the functions above are given; `loss`: the keywords of an objective."""
    if not 0 <= margin < 1:
        raise ValueError(f"`margin` must be a number in [0, 1). Received: margin={margin!r}.")
    objective = Objective(model, **loss)
    batch = objective.batch(batch)
    if batch.rows == 0:
        raise ValueError("A batch needs at least one row, to measure what a row takes. Received: 0 rows.")
    limit = parse_bytes(memory_limit) or MemoryMeter(objective.device).limit()
    if limit is None:
        raise ValueError('This machine does not report how much memory it has. Give `memory_limit`, such as "16GiB".')
    modules = [model, *([objective.loss_fn] if isinstance(objective.loss_fn, nn.Module) else [])]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    trained: list[Tensor] = [p for p in parameters if p.requires_grad]
    there = [*parameters, *(buffer for module in modules for buffer in module.buffers())]
    constant = bytes_of([*there, *(leaf for _, leaf in leaves(batch.tree))]) + optimizer_bytes(optimizer, trained)
    return Subject(objective, batch, limit, constant, trained, optimizer)
