"""Measures the gradient noise scale while training, from norms of the sums that are there anyway."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradaccum.noise import NoiseScale, Norms, estimate
from gradaccum.on_torch.gradients import clip_norm_, norms

__all__ = ["NoiseMeter"]


class NoiseMeter:
    """Two squared norms per window: of its first micro-batch's gradient, and of the finished mean.

    Autograd adds into `p.grad`, so that a micro-batch's own gradient is there by itself only once: after the first one.
    Its norm and the window's give unbiased estimates of `|G|^2` and `tr(S)` (see `gradaccum.noise`). Norms of each
    micro-batch would sharpen `tr(S)`, at the cost of a pass over all gradients for each; but for windows up to the
    noise scale, where the answer matters, the error is that of `|G|^2`, which only the number of windows lowers. So
    two passes per window it is, and every window counts. The host never waits for them: until somebody asks,
    they stay on the device.

    It takes the first micro-batch for a random sample of the window's rows: where rows are sorted, by length say, what
    the order adds to the spread counts as noise.

    Args:
        keep: Windows to look back on, as the noise scale drifts.
    """

    def __init__(self, keep: int = 500) -> None:
        self.unit = "rows"
        self._records: deque[tuple[_Measured, _Measured]] = deque(maxlen=keep)
        self.restart()

    def restart(self) -> None:
        """A new window begins; what was measured of an unfinished one is dropped."""
        self._first: _Measured | None = None

    @property
    def waiting(self) -> bool:
        """Whether the next micro-batch is to be shown."""
        return self._first is None

    def micro_batch(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor) -> None:
        """The first micro-batch of a window that weighs anything is in.

        Args:
            gradients: The sum so far.
            size: Rows of the micro-batch.
            multiple: What the sum is a multiple of the mean gradient by.
        """
        if self._first is None and gradients and not (isinstance(multiple, float) and multiple == 0.0):
            self._first = _Measured(norms(gradients), multiple, float(size))

    def window(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor = 1.0) -> None:
        """The gradient is finished, and not clipped yet.

        Args:
            gradients: The mean over the window.
            size: Rows of the window.
            multiple: What `gradients` are a multiple of that mean by.
        """
        if self._first is not None and gradients and size > self._first.size:
            sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
            found = clip_norm_(list(gradients), None).reshape(1) if sharded else norms(gradients)
            self._records.append((self._first, _Measured(found, multiple, float(size))))
        self.restart()

    def estimate(self) -> NoiseScale:
        """The noise scale over the windows that are kept. Waits for the device."""
        smalls = _squares([small for small, _ in self._records])
        larges = _squares([large for _, large in self._records])
        windows = [
            Norms(s, small.size, n, large.size)
            for s, n, (small, large) in zip(smalls, larges, self._records, strict=True)
        ]
        return estimate(windows, unit=self.unit)


class _Measured(NamedTuple):
    """The norms of some gradients. The arithmetic waits until somebody asks."""

    norms: Tensor
    multiple: float | Tensor
    size: float


def _squares(measured: Sequence[_Measured]) -> list[float]:
    """`|gradients / multiple|^2` of each."""
    squares = [
        (m.norms.double() / (m.multiple.detach().to(m.norms.device) if isinstance(m.multiple, Tensor) else m.multiple))
        .square()
        .sum()
        for m in measured
    ]
    return torch.stack([square.to(squares[0].device) for square in squares]).tolist() if squares else []
