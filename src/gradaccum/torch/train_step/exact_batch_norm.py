"""The large batch as one piece of a `TrainStep`, where its BatchNorm layers have to see all rows at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from gradaccum.core.sizes import Piece, Rows
from gradaccum.on_torch.batch import BatchDims
from gradaccum.on_torch.fitting import Fitting, Passes, StartOver
from gradaccum.on_torch.memory import Gauge, is_out_of_memory
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.chunking import chunked

__all__ = ["EXACT_MICRO_BATCH_SIZE", "WholeBatch", "check_exact", "run_at_once"]

logger = logging.getLogger("gradaccum")

EXACT_MICRO_BATCH_SIZE = 32
"""Rows, for "auto": all rows' boundary activations are kept in any case, and larger micro-batches are hardly faster."""


class WholeBatch:
    """A model that takes the large batch, in micro-batches, with exact BatchNorm.

    Args:
        model: The model; the inside of a DistributedDataParallel is what gets cut.
        batch_dims: Where the rows of the batch are.
        takes_inputs: Whether the model is called with the batch's first element, as `loss_fn(model(x), y)` has it.
        offload: Keep what crosses the BatchNorm layers in host memory.
    """

    def __init__(self, model: nn.Module, batch_dims: BatchDims, takes_inputs: bool, *, offload: bool = False) -> None:
        self.outer = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self.inner = model if self.outer is None else self.outer.get_submodule("module")
        self.chunks = chunked(
            self.inner,
            EXACT_MICRO_BATCH_SIZE,
            batch_dims=_of_the_model(batch_dims, takes_inputs),
            batch_norm="exact",
            offload=offload,
            verify=False,
        )

    @property
    def model(self) -> nn.Module:
        """What to call on the large batch."""
        return self.chunks if self.outer is None else self.outer

    @property
    def needed(self) -> bool:
        """Whether the model looks across rows as it is now."""
        return bool(batch_norms(self.inner))

    @contextlib.contextmanager
    def in_micro_batches(self, size: int) -> Iterator[None]:
        """Calls of `model` inside run in micro-batches of at most so many rows."""
        self.chunks.micro_batch_size = size
        if self.outer is None:
            yield
            return
        self.outer._modules["module"] = self.chunks
        try:
            yield
        finally:
            self.outer._modules["module"] = self.inner


def _of_the_model(batch_dims: BatchDims, takes_inputs: bool) -> Any:
    if batch_dims is None or isinstance(batch_dims, int):
        return 0 if batch_dims is None else batch_dims
    if not takes_inputs:
        return 0
    return (batch_dims[0],) if isinstance(batch_dims, (tuple, list)) else (batch_dims,)


def check_exact(choice: str, offload: Any, max_tokens: int | None, groups: Any, blocks: Any = None) -> None:
    """Whether these options of a `TrainStep` go together with what it does about BatchNorm.

    Raises:
        ValueError: They don't.
    """
    if offload and choice != "exact" and blocks is None:
        raise ValueError(
            "offload=True keeps what crosses exact BatchNorm layers in host memory, or what lies between `blocks`, so "
            f'it needs batch_norm="exact" or `blocks`. Received: batch_norm={choice!r}, blocks=None.'
        )
    if choice == "exact" and not isinstance(offload, bool):
        raise TypeError(f'With batch_norm="exact" `offload` must be True or False. Received: offload={offload!r}.')
    if max_tokens is not None and choice == "exact":
        raise ValueError('batch_norm="exact" needs the whole batch as it is padded. Leave out `max_tokens`.')
    if groups is not None and choice == "exact":
        raise ValueError('batch_norm="exact" gives the loss all rows at once. Leave out `groups`.')


def run_at_once(whole: WholeBatch, rows: int, plan: Rows, passes: Passes, fitting: Fitting, gauge: Gauge) -> None:
    """All rows at once, through a model that takes them in micro-batches: smaller ones, where these don't fit.

    Raises:
        StartOver: They did not fit; smaller ones may.
    """
    size = plan.sizer.next_size(rows)
    try:
        with whole.in_micro_batches(size):
            fitting.once(Piece(slice(0, rows)), plan, passes)
        return
    except Exception as error:
        if not is_out_of_memory(error) or size == 1:
            raise
    gauge.release()
    plan.sizer.failed(size)
    logger.warning("Out of memory with micro-batches of %d rows: all over again with %d.", size, plan.sizer.size)
    raise StartOver
