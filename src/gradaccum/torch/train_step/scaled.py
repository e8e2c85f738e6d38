"""Passes and windows with a GradScaler, and those that measure the noise scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradaccum.core.sizes import Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import WindowTotal
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.torch.loss import BatchLosses, Weight, WeightedLoss
from gradaccum.torch.train_step.passes import TrainPasses
from gradaccum.torch.train_step.window import WindowRunner


class ScaledPasses(TrainPasses):
    """Losses are multiplied by the GradScaler's scale."""

    def __init__(self, runner: Any, window: BatchLosses, batch: Batch) -> None:
        super().__init__(runner, window, batch)
        if runner.scaler is not None:
            self.scale, self._quick = runner.scaler.scale, False


class NoisyRunner(WindowRunner):
    """Measures the gradient of the first micro-batch, and that of the window, for the noise scale."""

    def __init__(self, *arguments: Any, noise: NoiseMeter, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.noise = noise

    def scale(self) -> float | Tensor:
        if self.scaler is None:
            return 1.0
        return self.scaler.scale(torch.ones((), dtype=torch.float64, device=self.buffer.parameters()[0].device))

    def clear(self) -> None:
        super().clear()
        self.noise.restart()

    def total(self, window: BatchLosses, divisor: Weight | None, batch: Batch) -> WindowTotal:
        total = super().total(window, divisor, batch)
        total.rows, total.scale = self.rows_of_all(batch), self.scale()
        total.multiple = 1.0 if window.is_mean else float(total.rows)
        return total


class NoisyPasses(TrainPasses):
    """Tells the noise meter of the first micro-batch that counts."""

    def __init__(self, runner: Any, window: BatchLosses, batch: Batch) -> None:
        super().__init__(runner, window, batch)
        window.shares = True

    def backward(self, piece: Slice, weighted: WeightedLoss) -> None:
        super().backward(piece, weighted)
        runner: Any = self.runner
        noise: NoiseMeter = runner.noise
        if noise.waiting and weighted.ends:
            noise.counts_rows = True
            sums, multiple = runner.buffer.gradients(), self.window.multiple(weighted, piece.size)
            noise.micro_batch(sums, piece.size, runner.scale() * multiple)
