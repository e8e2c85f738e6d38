"""What every runner of a proof in PyTorch has in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradaccum.core.proof import Measured, Outcome, Runner
from gradaccum.core.rounding import rounding
from gradaccum.on_torch.adapter.arrays import bits_flipped, is_finite, measure
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.memory import is_out_of_memory

__all__ = ["TorchRunner"]

FLIPPED_BITS = (1, 2, 3, 5, 7)
"""The last bits of the parameters are changed in so many ways, to see what rounding makes of a result."""


class TorchRunner(Runner):
    """Arithmetic, rounding, random numbers and memory of a proof in PyTorch."""

    def __init__(self, rng: RowwiseRng, device: torch.device) -> None:
        self.rng, self.device = rng, device

    def tensors(self) -> list[Tensor]:
        """What it computes with: its last bits decide what rounding is."""
        raise NotImplementedError

    def nearby(self, rows: Sequence[int]) -> Iterator[Outcome]:
        for bits in FLIPPED_BITS:
            with bits_flipped(self.tensors(), bits):
                outcome = self.at_once(rows)
            yield outcome

    def at_once(self, rows: Sequence[int]) -> Outcome:
        """The rows at once, once more: nothing is noted."""
        return self.run(rows, None)

    def measure(self, pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Measured]:
        return measure(pairs)

    def is_finite(self, arrays: Sequence[Tensor]) -> bool:
        return is_finite(arrays)

    @property
    def tolerance(self) -> float:  # type: ignore[override]  # it follows what is computed
        return rounding(str(self.rng.precision), self.device.type)

    @property
    def in_half(self) -> bool:  # type: ignore[override]
        return self.rng.precision.itemsize <= 2

    def replace_noise(self) -> bool:
        return self.rng.replace_noise()

    def is_out_of_memory(self, error: Exception) -> bool:
        return is_out_of_memory(error)
