"""How a large batch is cut into micro-batches: by rows, by tokens, in sizes that are given, found or lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradaccum.core.equivalence import Cause
from gradaccum.core.sizes import BatchSizeFinder, FixedSize, GivenSizes, Groups, Plan, Rows, Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.loss import Objective
from gradaccum.torch.train_step.options import Options, with_groups

EXACT_MICRO_BATCH_SIZE = 32
"""Rows, for "auto" with exact BatchNorm: all rows' boundary activations are kept in any case, and larger micro-batches
are hardly faster."""

ROWS = 16
"""Rows of a forward pass without gradients while the size of micro-batches is still searched for."""


class MicroBatcher:
    """Plans the micro-batches of large batches, and takes them."""

    def __init__(self, objective: Objective, meter: MemoryMeter, options: Options, *, judge: bool) -> None:
        normalises = options.batch_norm != "frozen" and bool(batch_norms(objective.model))
        self.least = 2 if normalises else 1  # the fewest rows of a micro-batch
        size, max_tokens, pack = options.micro_batch_size, options.max_tokens, options.pack
        size = EXACT_MICRO_BATCH_SIZE if options.batch_norm == "exact" and size == "auto" else size
        self.finder = BatchSizeFinder(size, meter.limit, minimum=self.least)
        self._predict: Callable[[Batch], int] | None = None
        self.predicting = False  # whether a pass on fake tensors runs just now, to predict a size
        self._groups, self._objective, self._meter = options.groups, objective, meter
        self._searches = options.searches
        self.packing: Any = None
        """Sorts and cuts rows, or joins them, for `max_tokens`."""
        self._planned: tuple[Any, Rows] | None = None
        """The signature of the latest batch, and its plan: the same for all batches like it."""
        if max_tokens is not None:
            from gradaccum.torch.padding.judged import packing

            self.packing = packing(objective, max_tokens, self.finder.size, pack, judge=judge)

    def without_trying(self, optimizers: Sequence[torch.optim.Optimizer], ranks: Any, *, proves: bool) -> None:
        """Try nothing out, for other ranks would wait in such passes: what fits is predicted."""
        if self._searches:
            from gradaccum.torch.measure import largest_fitting

            largest = functools.partial(largest_fitting, self._objective, self._meter, optimizers, ranks)
            self._predict = functools.partial(self._predicted, largest)
        if self.packing is not None and proves:
            self.packing.keep_left()

    def _predicted(self, largest: Callable[[Batch], int], batch: Batch) -> int:
        self.predicting = True
        try:
            return largest(batch)
        finally:
            self.predicting = False

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or not {"updates", "sizes"} <= state.keys():
            found = [*state] if isinstance(state, Mapping) else repr(state)
            raise ValueError(
                f"This is no state of a TrainStep: 'updates' and 'sizes' must be in it. Received: {found}. Load the "
                "model's and the optimizer's own states into these."
            )
        self.finder.load_state_dict(state["sizes"])
        self._planned = None

    def grouped(self, batch: Batch) -> Batch:
        """The batch with its groups, the rows of each brought together."""
        if self._groups is None:
            return batch
        batch = with_groups(batch, self._groups)
        if batch.groups is not None and batch.rows:
            self.finder.minimum = max(self.least, *(len(unit) for unit in batch.units()))
        return batch

    def plan(self, batch: Batch, sizes: Sequence[int] | None = None) -> Plan:
        planned = self._planned
        if planned is not None and sizes is None and planned[0] == batch.signature and not planned[1].measuring:
            return planned[1]
        if self.packing is not None and (sizes is None or len(sizes) > 1):
            return self.packing.plan(batch, sizes)
        groups = None if batch.groups is None else Groups(batch.groups.tolist())
        if sizes is not None:
            return GivenSizes(sizes, groups)
        predict = None if self._predict is None else functools.partial(self._predict, batch)
        if predict is not None and not batch.rows:
            return Rows(FixedSize(1), 0, groups)
        plan = Rows(self.finder.of(batch.leaves, predict), batch.rows, groups)
        self._planned = (batch.signature, plan) if groups is None else None
        return plan

    def splits(self, batch: Batch) -> bool:
        """Whether the micro-batches of this batch may be more than one, or other than the batch."""
        return batch.rows > (self.finder.size or 0) or self.packing is not None

    def text(self, batch: Batch) -> frozenset[str]:
        """The paths of what `max_tokens` cuts in this batch; nothing without it."""
        return frozenset() if self.packing is None else self.packing.text(batch)

    def explain(self, error: BaseException, batch: Batch) -> None:
        """Note beside an error of the model's what `max_tokens` has cut: shapes that don't fit may be its doing."""
        if self.packing is not None and isinstance(error, RuntimeError | ValueError | IndexError):
            self.packing.explain(error, batch)

    def without_measuring(self, batch: Batch, sizes: Sequence[int] | None = None) -> Plan:
        """The same, for passes from which nothing is to be learned about sizes."""
        plan = self.plan(batch, sizes)
        if isinstance(plan, Rows) and plan.measuring:
            return Rows(FixedSize(max(plan.sizer.size, ROWS, self.finder.minimum)), batch.rows, plan.groups)
        return plan

    def take(self, batch: Batch, piece: Slice) -> Batch:
        rows = piece.rows
        if type(rows) is slice:
            return batch.take(rows)
        if self.packing is None or piece.columns is None:
            return batch.take(torch.tensor(rows))
        return self.packing.take(batch, piece)

    def cause(self, batch: Batch, sure: bool) -> Cause | None:
        """Why micro-batches differ from a batch; `sure`: nothing else is wrong with it. None: nobody knows."""
        return None if self.packing is None else self.packing.cause(batch, sure)

    def close(self, plan: Plan, batch: Batch) -> None:
        if isinstance(plan, Rows) and batch.rows:
            self.finder.close(plan.sizer, batch.rows)
