"""The micro-batches of a batch where BatchNormalization pools its statistics, or uses those that it has."""

from __future__ import annotations

from typing import Any

from gradaccum.keras.backends.base import assign, copies_of, values_of
from gradaccum.keras.batch_norm import Pool, during_micro_batch
from gradaccum.keras.train_step.passes import Pass


class BatchNormPass(Pass):
    """A pass in which BatchNormalization layers do what `batch_norm="pooled"` or `"frozen"` says."""

    def __init__(self, step: Any, batches: Any, gradients: Any) -> None:
        super().__init__(step, batches, gradients)
        self.layers = step.batch_norms
        self.pool = Pool(self.layers if step.batch_norm == "pooled" else [])
        self.previous: list[Any] = []  # the moving statistics, when the batch began

    def carried(self) -> list[Any]:
        self.previous = copies_of(self.pool.variables)
        return self.pool.zeros()

    def forward(self, micro_batch: Any, share: Any) -> tuple[Any, Any]:
        with during_micro_batch(self.layers, self.step.batch_norm) as valid:
            scaled, (*others, _) = super().forward(micro_batch, share)
        return scaled, (*others, valid)

    def with_micro_batch(self, carried: list[Any], seen: Any, size: Any) -> list[Any]:
        return self.pool.add(carried, values_of(self.pool.variables), seen, size)

    def finish(self, carried: list[Any]) -> None:
        assign(self.pool.variables, self.pool.moved(carried, self.previous))
