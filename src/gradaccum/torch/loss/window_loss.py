"""The loss of a window, as far as the wrapped optimizer is told its micro-batches' losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradaccum.window import Reduction

__all__ = ["WindowLoss"]


class WindowLoss:
    """The losses of a window's micro-batches, and their mean: nothing is computed until somebody asks."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.restart()

    def restart(self) -> None:
        """A new window begins."""
        self.entries: list[tuple[int, Tensor, float]] = []
        self.weighed = False
        self.dropped: set[int] = set()

    def add(self, micro_batch: int, loss: Tensor, weight: float, given: bool) -> None:
        """One loss of a micro-batch, which may have several."""
        self.entries.append((micro_batch, loss.detach(), weight))
        self.weighed = self.weighed or given

    def unscale(self, micro_batch: int, scale: Tensor) -> None:
        """Losses of this micro-batch came multiplied by a GradScaler's scale."""
        self.entries = [(i, loss / scale if i == micro_batch else loss, w) for i, loss, w in self.entries]

    def mean(self) -> Tensor | None:
        """The window's loss, of no dimensions; None without entries."""
        kept = [entry for entry in self.entries if entry[0] not in self.dropped]
        if not kept:
            return None
        losses = torch.stack([loss.reshape(()) for _, loss, _ in kept])
        total = math.fsum({index: weight for index, _, weight in kept}.values())
        if self.reduction == "sum":
            return losses.sum() / total if self.weighed else losses.sum()
        return losses @ torch.tensor([w / total for _, _, w in kept], dtype=losses.dtype, device=losses.device)

    def state_dict(self) -> dict[str, Any]:
        """The losses so far: copies."""
        return {
            "losses": [[i, loss.clone(), weight] for i, loss, weight in self.entries],
            "losses_weighed": self.weighed,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` wrote."""
        self.restart()
        self.entries = [(i, loss.to(device, copy=True), weight) for i, loss, weight in state["losses"]]
        self.weighed = state["losses_weighed"]
