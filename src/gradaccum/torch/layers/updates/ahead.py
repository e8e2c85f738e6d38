"""What an update must know of all gradients before it uses the first: their norm, and whether they are finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.rounding import rounding
from gradaccum.on_torch.foreach import norms, scale_, total_norm

__all__ = ["Ahead"]


class Ahead:
    """A first run of backward, in which each block's gradient is looked at and freed; the second run uses them.

    What has a gradient before the blocks' turns come, or gets some around them, is complete after the first run and
    kept: it is needed as long in any case. What arrives for it in the second run is dropped as it arrives.

    Args:
        clip_grad_norm: Largest 2-norm of all gradients, or None.
        scaler: A `torch.amp.GradScaler` that the losses are scaled by, or None.

    Example:
        >>> p, ahead = torch.nn.Parameter(torch.zeros(2)), Ahead(1.0, None)
        >>> ahead.begin([p], kept=set())
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> ahead.look([p], 0)
        >>> p.grad is None, ahead.close_first().item()
        (True, 5.0)
        >>> p.grad = torch.tensor([3.0, 4.0])           # once more
        >>> ahead.clip([p])
        >>> p.grad
        tensor([0.6000, 0.8000])
    """

    def __init__(self, clip_grad_norm: float | None = None, scaler: Any = None) -> None:
        self._most, self._scaler = clip_grad_norm, scaler
        self._parts: list[_Part] = []
        self._hooks: list[Any] = []
        self.open()

    @property
    def wanted(self) -> bool:
        """Whether there is anything to know."""
        return self._most is not None or self._scaler is not None

    @property
    def scaled(self) -> bool:
        """Whether gradients are scaled, and those that are not finite left out."""
        return self._scaler is not None

    def open(self) -> None:
        """A window begins."""
        self.close()
        self.abandon()  # what has begun again
        self._kept, self._aside = set[int](), dict[Tensor, Tensor | None]()
        self._norms: dict[int, list[Tensor]] = {}
        self._after: list[tuple[Tensor, Tensor | None, int]] = []
        self._norm = torch.tensor(0.0)
        self._factor: Tensor | None = None

    def begin(self, leaves: Iterable[Tensor], kept: Collection[int]) -> None:
        """The first run begins.

        Args:
            leaves: All that gets gradients.
            kept: Those of them, by id, that get some around the blocks.
        """
        self._aside = {leaf: None for leaf in leaves if id(leaf) in kept or leaf.grad is not None}
        self._kept = set(map(id, self._aside))

    # The first run.

    def look(self, parameters: Sequence[Tensor], place: int) -> None:
        """These gradients are finished, after the turn of the block at this place: note their norms and free them."""
        found = [p.grad for p in parameters if p.grad is not None]
        self._norms[place] = norms(found)
        for p in parameters:
            if id(p) not in self._kept:
                p.grad = None
        self._after += [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def late(self) -> list[Tensor]:
        """What has got gradients after they were looked at."""
        moved = [p for p, g, v in self._after if p.grad is not g or (g is not None and g._version != v)]
        self._after = []
        return moved

    def close_first(self) -> Tensor:
        """The first run is over. Returns the norm of all gradients; what is complete by now is put aside."""
        self._norm = norm = total_norm([one for place in self._norms.values() for one in place])
        if self._most is not None:
            self._factor = torch.clamp(self._most / (norm + 1e-6), max=1.0)
        for p in self._aside:
            self._aside[p], p.grad = p.grad, None
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(_drop))
        return norm

    # The second run.

    def give_back(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Their turn comes: the gradients of these that were put aside, or all that are left."""
        for p in [*self._aside] if parameters is None else parameters:
            if p in self._aside:
                p.grad = self._aside.pop(p)

    def differs(self, parameters: Sequence[Tensor], place: int) -> bool:
        """Whether the second run has given these other gradients than the first."""
        again = total_norm(norms([p.grad for p in parameters if p.grad is not None]))
        apart = float(again - total_norm(self._norms.get(place, [])).to(again))
        allowed = rounding(str(again.dtype), again.device.type)
        return abs(apart) > allowed * float(self._norm)  # not where a loss is NaN: it is so in both

    def clip(self, parameters: Sequence[Tensor]) -> None:
        """Multiply these gradients by the factor that all of them get."""
        if self._factor is not None:
            scale_([p.grad for p in parameters if p.grad is not None], self._factor)

    # Both.

    def complete(self, parameter: Tensor) -> bool:
        """Whether the gradient that is there has been divided and unscaled in the first run."""
        return id(parameter) in self._kept

    def unscale(self, parameters: Sequence[Tensor], owner: Any) -> None:
        """Take the scaler's scale out of these gradients of an optimizer, and note whether they are finite."""
        if self._scaler is not None and any(p.grad is not None for p in parameters):
            part = _Part(parameters, owner)
            self._parts.append(part)  # the scaler knows it by its id
            self._scaler.unscale_(part)

    def overflown(self) -> set[int]:
        """The optimizers, by id, whose gradients are not all finite."""
        for part in self._parts:
            self._scaler.step(part)
        return {id(part.owner) for part in self._parts if not part.finite}

    def tell(self) -> None:
        """The window is over: the scaler goes on with the scale that follows."""
        if self._scaler is not None:
            self._scaler.update()
        self._parts = []

    def abandon(self) -> None:
        """It has failed: the scaler has not heard of it."""
        if self._parts:
            self._scaler.update(self._scaler.get_scale())
        self._parts = []

    def close(self) -> None:
        """No more runs: let arrive what arrives."""
        while self._hooks:
            self._hooks.pop().remove()


class _Part:
    """Stands in for an optimizer when a GradScaler unscales some of its gradients, and asks whether to step it."""

    def __init__(self, parameters: Sequence[Tensor], owner: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.owner, self.finite = owner, False

    def step(self) -> None:
        """The scaler has found all of them finite."""
        self.finite = True


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
