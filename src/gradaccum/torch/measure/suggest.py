"""The largest micro-batch for a memory limit, without the hardware that has it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import MARGIN, DoesNotFit, SizeEstimate, format_bytes, largest_size
from gradaccum.on_torch.batch import Batch, BatchDims, leaves
from gradaccum.on_torch.memory import MemoryMeter, parse_bytes
from gradaccum.torch.layers import BlocksChoice, has_blocks
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import bytes_of, micro_batch_peak, optimizer_bytes
from gradaccum.torch.measure.ways import Ways, find_ways

__all__ = ["SIZE_KEYWORDS", "DoesNotFit", "SizeEstimate", "estimate_size", "estimate_ways", "suggest_micro_batch_size"]

logger = logging.getLogger("gradaccum")

SIZE_KEYWORDS = frozenset(
    ["loss_fn", "compute_loss", "memory_limit", "optimizer", "weight", "reduction", "batch_dims", "autocast", "margin"]
)
"""What the functions below take by name."""


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
    subject = _Subject.of(model, batch, margin, **keywords)
    objective, batch, constant, limit = subject.objective, subject.batch, subject.constant, subject.limit
    allowed = (1 - margin) * limit

    def peak(size: int) -> int:
        return constant + micro_batch_peak(objective, batch, size, 1 if size == batch.rows else 2)

    size, needed = largest_size(peak, batch.rows, allowed)
    if needed > allowed:
        raise DoesNotFit(
            f"Not even a micro-batch of one row fits: it needs about {format_bytes(needed)}, and "
            f"{format_bytes(int(allowed))} are there ({100 * margin:.0f} % of {format_bytes(int(limit))} left "
            "free). Make the model smaller, shard it, or use gradient checkpointing or autocast=torch.bfloat16."
        )
    return SizeEstimate(size, batch.rows, int(limit), needed, constant + bytes_of(subject.trained), margin)


def estimate_ways(
    model: nn.Module, batch: Any, *, blocks: BlocksChoice = "auto", margin: float = MARGIN, **keywords: Any
) -> Ways:
    """What each way of making the large batch's update needs, and the largest micro-batch that it fits with.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        >>> batch = torch.zeros(64, 256), torch.zeros(64, 256)
        >>> ways = estimate_ways(model, batch, loss_fn=nn.MSELoss(), memory_limit="8MiB")
        >>> [way.name for way in ways.ways if way.fits]
        ['updated in backward', 'updated in backward, offloaded', 'parameters on the host']
    """
    subject = _Subject.of(model, batch, margin, **keywords)
    found = functools.partial(
        find_ways,
        subject.objective,
        subject.batch,
        constant=subject.constant,
        limit=subject.limit,
        margin=margin,
        trained=subject.trained,
        state_bytes=subject.state_bytes,
    )
    if blocks != "auto":
        return found(blocks)
    if not has_blocks(model):
        note = (
            "No list of blocks was found, so the ways layer by layer are left out. Name it: a dotted path such as "
            '"encoder.layers", or a list of modules, as `blocks`; on the command line as "blocks" in the dict that '
            "make() returns in place of loss_fn."
        )
        return dataclasses.replace(found(None), note=note)
    try:
        return found(blocks)
    except ValueError as error:  # such as blocks that share a module
        return dataclasses.replace(found(None), note=f"Not layer by layer: {error}")


class _Subject(NamedTuple):
    """A model, its loss and its large batch, and the bytes that are there whatever is done with them."""

    objective: Objective
    batch: Batch
    limit: float
    constant: int
    trained: list[Tensor]
    state_bytes: Callable[[list[Tensor]], int]
    """Of the optimizer's state for some parameters."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: Any,
        margin: float,
        *,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        memory_limit: int | str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        weight: Callable[..., Any] | None = None,
        reduction: str = "mean",
        batch_dims: BatchDims = 0,
        autocast: torch.dtype | None = None,
    ) -> _Subject:
        """As the functions above are given them."""
        if not 0 <= margin < 1:
            raise ValueError(f"`margin` must be a number in [0, 1). Received: margin={margin!r}.")
        objective = Objective(
            model,
            loss_fn=loss_fn,
            compute_loss=compute_loss,
            weight=weight,
            reduction=reduction,
            batch_dims=batch_dims,
            autocast=autocast,
        )
        batch = objective.batch(batch)
        if batch.rows == 0:
            raise ValueError("A batch must have at least one row to tell what a row takes. Received: 0 rows.")
        limit = parse_bytes(memory_limit) or MemoryMeter(objective.device).limit()
        if limit is None:
            raise ValueError('This machine does not say what memory it has. Give `memory_limit`, such as "16GiB".')
        modules = [model, *([objective.loss_fn] if isinstance(objective.loss_fn, nn.Module) else [])]
        parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
        trained: list[Tensor] = [p for p in parameters if p.requires_grad]
        constant = (
            bytes_of(parameters)
            + bytes_of(buffer for module in modules for buffer in module.buffers())
            + optimizer_bytes(optimizer, trained)
            + bytes_of(leaf for _, leaf in leaves(batch.tree))
        )
        return cls(objective, batch, limit, constant, trained, functools.partial(optimizer_bytes, optimizer))
