"""The mean loss of a window: `sum_i w_i l_i / sum_i w_i`, or `sum_i l_i` of losses that are sums without weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.window import Reduction


class Losses:
    """The losses of one window, detached. They stay until the next window's first one; `mean` alone computes."""

    over = weighed = False
    """Whether the window has closed; whether the user has said what a loss weighs."""

    def __init__(self, reduction: Reduction) -> None:
        self._adds = reduction == "sum"
        self.restart()

    def restart(self) -> None:
        self._losses: list[tuple[int, Tensor]] = []  # with the micro-batch, which may have several
        self._weights: dict[int, float] = {}  # of the micro-batches
        self.over = self.weighed = False

    def add(self, micro_batch: int, loss: Tensor, weight: float, given: bool) -> None:
        if self.over:
            self.restart()
        self._losses.append((micro_batch, loss.detach()))
        self._weights[micro_batch] = weight
        self.weighed = self.weighed or given

    def mean(self) -> Tensor | None:
        if not self._losses:
            return None
        device = self._losses[0][1].device
        losses = torch.stack([loss.to(device) for _, loss in self._losses])
        wide = losses.double() if device.type != "mps" else losses.float()
        if not self._adds:
            wide = wide * torch.tensor([self._weights[i] for i, _ in self._losses], dtype=wide.dtype).to(device)
        divisor = 1.0 if self._adds and not self.weighed else math.fsum(self._weights.values())
        return (wide.sum() / divisor).to(losses.dtype)

    def unscale(self, micro_batch: int, scale: Tensor | None, live: Tensor | None) -> None:
        """Losses of this micro-batch came multiplied by a GradScaler's scale: the last one known after `unscale_`."""
        scale = live if scale is None else scale
        if scale is None:
            self._losses.clear()
        else:
            self._losses = [(i, (x / scale).reshape(()) if i == micro_batch else x) for i, x in self._losses]

    def state_dict(self) -> dict[str, Any]:
        losses = [[i, loss.clone(), self._weights[i]] for i, loss in self._losses]
        return {"losses": losses, "losses_weighed": self.weighed}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.restart()
        for micro_batch, loss, weight in state["losses"]:
            self.add(micro_batch, loss.to(device, copy=True).reshape(()), weight, state["losses_weighed"])
