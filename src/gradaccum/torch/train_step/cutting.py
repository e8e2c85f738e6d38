"""How a large batch is cut into micro-batches: by rows, by tokens, in sizes that are given, found or lowered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import Gauge
from gradaccum.sizes import FixedSize, GivenSizes, Piece, Rows, Sizers, Tokens
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.loss import Objective
from gradaccum.torch.padding import packed_rows
from gradaccum.torch.train_step.padding import Packing

__all__ = ["Cutting"]

ROWS = 16
"""Rows of a forward pass without gradients while the size of micro-batches is still searched for."""


class Cutting:
    """Plans the micro-batches of large batches, and takes them.

    Args:
        objective: The loss, with the model that a plain loop calls.
        gauge: What memory there is.
        micro_batch_size: Rows, or `"auto"`.
        max_tokens: Padded tokens of a micro-batch, or None.
        judge: Whether to try out if padding can be cut off.
    """

    def __init__(
        self, objective: Objective, gauge: Gauge, micro_batch_size: int | str, max_tokens: int | None, *, judge: bool
    ) -> None:
        model = objective.model
        self.sizers = Sizers(micro_batch_size, gauge.limit, minimum=2 if batch_norms(model) else 1)
        self.packing = None if max_tokens is None else Packing(objective, max_tokens, self.sizers.size, judge=judge)

    def plan(self, batch: Batch, sizes: Sequence[int] | None = None) -> Rows | Tokens:
        """The micro-batches of a batch.

        Args:
            batch: The large batch.
            sizes: Their rows, in order; None: as `micro_batch_size` and `max_tokens` say. One size, for all rows,
                leaves out the packing of `max_tokens`, too.
        """
        if self.packing is not None and (sizes is None or len(sizes) > 1):
            return self.packing.plan(batch, sizes)
        return Rows(self.sizers.of(batch.leaves), batch.rows) if sizes is None else GivenSizes(sizes)

    def splits(self, batch: Batch) -> bool:
        """Whether the micro-batches of this batch may be more than one, or other than the batch."""
        return batch.rows > (self.sizers.size or 0) or self.packing is not None

    def without_measuring(self, batch: Batch, sizes: Sequence[int] | None = None) -> Rows | Tokens:
        """The same, for passes from which nothing is to be learned about sizes."""
        plan = self.plan(batch, sizes)
        if isinstance(plan, Rows) and plan.measuring:
            return Rows(FixedSize(max(plan.sizer.size, ROWS)), batch.rows)
        return plan

    def take(self, batch: Batch, piece: Piece) -> Batch:
        """The micro-batch of a piece."""
        if isinstance(piece.rows, slice):
            return batch.take(piece.rows)
        if self.packing is None or piece.columns is None:
            return batch.take(torch.tensor(piece.rows))
        return packed_rows(batch, piece, self.packing.left)

    def close(self, plan: Rows | Tokens, batch: Batch) -> None:
        """A window that followed this plan is over."""
        if isinstance(plan, Rows) and batch.rows:
            self.sizers.close(plan.sizer, batch.rows)
