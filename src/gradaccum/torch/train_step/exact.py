"""Exact BatchNorm: the loss sees all rows together, and the model runs them in micro-batches, layer by layer."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from gradaccum.core.sizes import Plan, Rows, Slice
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow, nothing_fits
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.chunking import chunked
from gradaccum.torch.loss import Terms
from gradaccum.torch.train_step.micro_batcher import EXACT_MICRO_BATCH_SIZE
from gradaccum.torch.train_step.passes import TrainPasses
from gradaccum.torch.train_step.window import WindowRunner

logger = logging.getLogger("gradaccum")


class ExactRunner(WindowRunner):
    """Runs all rows at once, as long as the model looks across them."""

    def __init__(self, *arguments: Any, whole: WholeBatch, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.whole = whole

    def run_passes(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        if not self.whole.needed:
            super().run_passes(batch, plan, passes)
        else:
            whole = None
            if isinstance(plan, Rows) and batch.rows:
                whole = functools.partial(self.whole.run, batch.rows, plan, passes, self.oom)
            self.run_whole(batch, plan, passes, whole)

    def run_whole(self, batch: Batch, plan: Plan, passes: TrainPasses, whole: Callable[[], None] | None) -> None:
        if whole is not None:
            whole()

    def count(self, batch: Batch, sizes: Sequence[int] | None, first: bool) -> list[Terms] | None:
        return None if self.whole.needed else super().count(batch, sizes, first)


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
        self.model = self.chunks if self.outer is None else self.outer  # what to call on the large batch

    @property
    def needed(self) -> bool:
        """Whether the model looks across rows as it is now."""
        return bool(batch_norms(self.inner))

    @contextlib.contextmanager
    def _in_micro_batches(self, size: int) -> Iterator[None]:
        self.chunks.micro_batch_size = size
        if self.outer is not None:
            self.outer._modules["module"] = self.chunks
        try:
            yield
        finally:
            if self.outer is not None:
                self.outer._modules["module"] = self.inner

    def run(self, rows: int, plan: Rows, passes: TrainPasses, oom: OomRetry) -> None:
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
        logger.warning(
            "Out of memory with micro-batches of %d rows: starting the batch again with %d.", size, smaller.size
        )
        raise RestartWindow(smaller)
