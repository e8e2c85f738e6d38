"""The large batch as one piece of a `TrainStep`, where its BatchNorm layers have to see all rows at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import nn

from gradaccum.core.sizes import Rows, Slice
from gradaccum.on_torch.batch import BatchDims
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OomRetry, Passes, RestartWindow, nothing_fits
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.chunking import chunked

__all__ = ["EXACT_MICRO_BATCH_SIZE", "WholeBatch"]

logger = logging.getLogger("gradaccum")

EXACT_MICRO_BATCH_SIZE = 32
"""Rows, for "auto": all rows' boundary activations are kept in any case, and larger micro-batches are hardly faster."""


class WholeBatch:
    """A model that takes the large batch, in micro-batches, with exact BatchNorm."""

    def __init__(self, model: nn.Module, batch_dims: BatchDims, takes_inputs: bool, *, offload: bool = False) -> None:
        self.outer = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self.inner = model if self.outer is None else self.outer.get_submodule("module")
        dims: BatchDims = batch_dims if isinstance(batch_dims, int) else 0
        if takes_inputs and not isinstance(batch_dims, int | None):  # of (x, y), those of x
            dims = (batch_dims[0] if isinstance(batch_dims, (tuple, list)) else batch_dims,)
        self.chunks = chunked(
            self.inner, EXACT_MICRO_BATCH_SIZE, batch_dims=dims, batch_norm="exact", offload=offload, verify=False
        )
        self.model = self.chunks if self.outer is None else self.outer
        """What to call on the large batch."""

    @property
    def needed(self) -> bool:
        """Whether the model looks across rows as it is now."""
        return bool(batch_norms(self.inner))

    @contextlib.contextmanager
    def _in_micro_batches(self, size: int) -> Iterator[None]:
        """Calls of `model` inside run in micro-batches of at most so many rows."""
        self.chunks.micro_batch_size = size
        if self.outer is not None:
            self.outer._modules["module"] = self.chunks
        try:
            yield
        finally:
            if self.outer is not None:
                self.outer._modules["module"] = self.inner

    def run(self, rows: int, plan: Rows, passes: Passes, oom: OomRetry) -> None:
        """All rows at once, in smaller micro-batches where these don't fit."""
        size = plan.sizer.next_size(rows)
        try:
            with self._in_micro_batches(size):
                oom.once(Slice(slice(0, rows)), plan, passes)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            smaller = plan.too_large(size) if size > 1 else None
            if smaller is None:
                raise nothing_fits(error) from error
        oom.meter.release()
        logger.warning("Out of memory with micro-batches of %d rows: all over again with %d.", size, smaller.size)
        raise RestartWindow(smaller)
