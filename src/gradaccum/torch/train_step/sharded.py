"""Windows of models that FSDP2 shards: all ranks run their passes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradaccum.core.sizes import Plan, Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.distributed import run_together
from gradaccum.torch.loss import BatchLosses, WeightedLoss
from gradaccum.torch.train_step.exact import ExactRunner
from gradaccum.torch.train_step.global_batch import RanksRunner
from gradaccum.torch.train_step.passes import TrainPasses

_NO_ROWS = (
    "This rank has no rows for a pass that the other ranks of a sharded model run, and the model or the loss can't run "
    "on 0 rows: {error}. Give each rank at least as many rows as there are micro-batches, or write sizes out: "
    "x.view(-1, width) works on 0 rows, x.view(len(x), -1) doesn't."
)


class ShardedRunner(RanksRunner):
    """As many passes on every rank, in turn or, with exact BatchNorm, at once."""

    def run_passes(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        self.run_whole(batch, plan, passes, None)

    def run_whole(self, batch: Batch, plan: Plan, passes: TrainPasses, whole: Callable[[], None] | None) -> None:
        run_together(self.ranks, self.oom, plan, passes, batch.rows, self.batcher.least, whole)


class ExactShardedRunner(ExactRunner, ShardedRunner):
    """Both."""

    def run_whole(self, batch: Batch, plan: Plan, passes: TrainPasses, whole: Callable[[], None] | None) -> None:
        ShardedRunner.run_whole(self, batch, plan, passes, whole)


class ShardedPasses(TrainPasses):
    """Each forward pass has a backward pass, which the other ranks wait for, even where it counts nothing."""

    def __init__(self, runner: Any, window: BatchLosses, batch: Batch) -> None:
        super().__init__(runner, window, batch)
        self._engine = runner.ranks.engine

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        if (losses := weighted.weightless) and not weighted.ends:
            self._backward_of_nothing(sum(losses[1:], losses[0]))
        super().backward(piece, weighted)

    def idle(self, micro_batch: Batch) -> None:
        """A forward and a backward pass that count nothing."""
        with self.runner.as_found():
            try:
                loss = self.window.objective.forward(micro_batch)[0]
            except (RuntimeError, ValueError, IndexError) as error:
                if micro_batch.rows or is_out_of_memory(error) or isinstance(error, WindowError):
                    raise
                raise ValueError(_NO_ROWS.format(error=error)) from error
            self._backward_of_nothing(loss)

    def _backward_of_nothing(self, loss: Tensor) -> None:
        self._engine.scale(0.0)
        try:
            loss.backward()
        finally:
            self._engine.scale(1.0)
