"""The loss of a window, as far as the wrapped optimizer is told its micro-batches' losses."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.window import Reduction

__all__ = ["WindowLoss"]


class WindowLoss:
    """The losses of a window's micro-batches, and their mean: nothing is computed until somebody asks."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.restart()

    def restart(self) -> None:
        """A new window begins."""
        self.entries: list[tuple[int, Tensor, float, Hashable]] = []
        self.weighed = False
        self.dropped: set[int] = set()

    def add(self, micro_batch: int, loss: Tensor, weight: float, given: bool, name: Hashable = None) -> None:
        """One loss of a micro-batch, which may have several; those of one `name` have a total of their own."""
        self.entries.append((micro_batch, loss.detach(), weight, name))
        self.weighed = self.weighed or given

    def unscale(self, micro_batch: int, scale: Tensor) -> None:
        """Losses of this micro-batch came multiplied by a GradScaler's scale."""
        self.entries = [(i, loss / scale if i == micro_batch else loss, w, n) for i, loss, w, n in self.entries]

    def means(self) -> dict[Hashable, Tensor]:
        """The window's mean of the losses of each name, of no dimensions; None names those that have no other."""
        named: dict[Hashable, list[tuple[int, Tensor, float]]] = {}
        for index, loss, weight, name in self.entries:
            if index not in self.dropped:
                named.setdefault(name, []).append((index, loss.reshape(()), weight))
        return {name: self._mean(entries, name) for name, entries in named.items()}

    def _mean(self, entries: list[tuple[int, Tensor, float]], name: Hashable) -> Tensor:
        losses, weights = torch.stack([loss for _, loss, _ in entries]), [weight for _, _, weight in entries]
        # Losses without a name have the micro-batch's weight, which counts once.
        total = math.fsum(weights if name is not None else {index: weight for index, _, weight in entries}.values())
        if self.reduction == "sum":
            return losses.sum() / total if self.weighed else losses.sum()
        return losses @ torch.tensor([w / total for w in weights], dtype=losses.dtype, device=losses.device)

    def mean(self) -> Tensor | None:
        """The window's loss, of no dimensions; None without entries."""
        means = list(self.means().values())
        return torch.stack(means).sum() if len(means) > 1 else means[0] if means else None

    def state_dict(self) -> dict[str, Any]:
        """The losses so far: copies."""
        return {
            "losses": [
                [i, loss.clone(), w] if n is None else [i, loss.clone(), w, n] for i, loss, w, n in self.entries
            ],
            "losses_weighed": self.weighed,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` wrote."""
        self.restart()
        self.entries = [
            (i, loss.to(device, copy=True), weight, name[0] if name else None)
            for i, loss, weight, *name in state["losses"]
        ]
        self.weighed = state["losses_weighed"]
