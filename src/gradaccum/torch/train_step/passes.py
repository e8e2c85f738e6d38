"""The forward and the backward pass of each micro-batch of a large batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradaccum.core.sizes import Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.oom_retry import OneRow, Passes
from gradaccum.torch.loss import BatchLosses, WeightedLoss

_ONE_ROW = (
    'BatchNorm can\'t normalise a micro-batch of one row by itself: {error}. Use batch_norm="exact", which normalises '
    "over the whole batch, or a `micro_batch_size` that leaves no single row: 2 for an even number of rows, 3 or more "
    "for any. A batch of one row has nothing to normalise over at all."
)


class TrainPasses(Passes):
    """Forward and backward passes that add to `p.grad`, on one device.

    A feature is a subclass that overrides some of `take`, `forward`, `backward` and `both`, and calls those of `super`.
    """

    scale: Callable[[Tensor], Tensor] | None = None
    """Multiplies each loss before its backward pass."""
    _plain = True
    """False if a subclass overrides `forward` or `backward`, so that both can't be one call."""

    def __init_subclass__(cls) -> None:
        cls._plain = cls.forward is TrainPasses.forward and cls.backward is TrainPasses.backward

    def __init__(self, runner: Any, window: BatchLosses, batch: Batch) -> None:
        self.window, self.runner, self.batch = window, runner, batch
        self._norm = runner.batch_norm
        self._moves = not runner.state.idle  # while a window runs, that stays so
        window.waits = runner.state.always
        self._quick = self._plain and self._norm.idle and not self._moves

    def take(self, piece: Slice) -> Batch:
        return self.runner.batcher.take(self.batch, piece)

    def both(self, piece: Slice) -> None:
        if not self._quick:
            self.backward(piece, self.forward(piece))
            return
        rows = piece.rows
        try:
            weighted = self.window.run(self.batch.take(rows) if type(rows) is slice else self.take(piece))
        except ValueError as error:
            self._check_one_row(piece, error)
            raise
        if weighted is not None:
            self.backward(piece, weighted)

    def forward(self, piece: Slice) -> WeightedLoss:
        micro_batch = self.take(piece)
        try:
            if self._norm.idle:
                return self.window.forward(micro_batch)
            with self._norm.micro_batch():
                return self.window.forward(micro_batch)
        except ValueError as error:
            self._check_one_row(piece, error)
            raise

    def _check_one_row(self, piece: Slice, error: ValueError) -> None:
        if piece.size == 1 and "more than 1 value per channel" in str(error):  # torch.nn.functional's
            raise OneRow(_ONE_ROW.format(error=error)) from error

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        self.window.backward(weighted, self.scale)
        if self._moves and piece.size < self.batch.rows:
            self.runner.buffers.micro_batch(self.runner.state.moved(), piece.size)


def composed(base: type[Any], *features: type[Any]) -> type[Any]:
    """A class with all of these features, subclasses of `base`; the first one overrides the others.

    Example:
        >>> class Louder(TrainPasses):
        ...     pass
        >>> composed(TrainPasses) is TrainPasses, composed(TrainPasses, Louder) is Louder
        (True, True)
    """
    needed = [one for one in features if not any(other is not one and issubclass(other, one) for other in features)]
    if len(needed) < 2:
        return needed[0] if needed else base
    return type(base.__name__, tuple(needed), {})
