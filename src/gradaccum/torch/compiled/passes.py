"""What torch.compile traces: the forward and backward passes of micro-batches, with their weights and their sum.

Nothing else of this package is traced. So these functions import nothing of it, and take tensors and users' functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class PassesOf:
    """The passes of one loss, as a function that torch.compile traces as a whole."""

    model: Any
    loss_fn: Any
    compute_loss: Any
    autocast: torch.dtype | None
    device_type: str
    names: tuple[Any, ...]
    """Of several losses; `(None,)` of a single one."""
    told: bool
    """Whether a loss comes with its weight."""
    by_own_weight: bool
    """Whether a loss is also multiplied by the weight that it comes with."""
    summed: bool
    """Whether `loss_fn` is a sum over targets."""
    rows: int = 0
    """Of each micro-batch, where a batch of tensors is cut here; 0 where it has been cut before."""

    def run(
        self,
        parameters: Sequence[Tensor],
        micro_batches: Sequence[Any],
        factors: Sequence[Sequence[Tensor]],
        sums: Sequence[Tensor] | None,
    ) -> tuple[Any, ...]:
        """Run micro-batches, and add their gradients to `sums` in place; without these, the new sums are returned.

        With `rows`, `micro_batches` are the tensors of the whole batch, and `factors` those of one micro-batch.
        Returns the losses and the weights of each micro-batch, which parameters have a gradient, and the new sums.
        """
        losses, weights, added = [], [], None
        if self.rows:
            micro_batches = list(zip(*[leaf.split(self.rows) for leaf in micro_batches]))
            factors = [factors[0] for _ in micro_batches]
        for micro_batch, factor in zip(micro_batches, factors):
            found, weighed = self._evaluate(micro_batch)
            gradients = self._gradients(parameters, found, weighed, factor)
            losses.append([loss.detach() for loss in found])
            weights.append(weighed)
            added = gradients if added is None else [_sum(*pair) for pair in zip(added, gradients)]
        reached = [gradient is not None for gradient in added or ()]
        if sums is None:
            return losses, weights, reached, added
        for total, gradient in zip(sums, added or ()):
            if gradient is not None:
                total.add_(gradient)
        return losses, weights, reached, None

    def _gradients(
        self, parameters: Sequence[Tensor], losses: Sequence[Tensor], weights: Sequence[Any], factors: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        ends, starts = [], []
        for loss, weight, factor in zip(losses, weights, factors):
            if loss.requires_grad:
                ends.append(loss)
                starts.append((factor * weight if self.by_own_weight else factor).to(loss.dtype))
        return torch.autograd.grad(ends, parameters, starts, allow_unused=True)

    def _evaluate(self, micro_batch: tuple[Any, ...]) -> tuple[list[Tensor], list[Any]]:
        if self.autocast is None:
            result = self._result(micro_batch)
        else:
            with torch.autocast(self.device_type, self.autocast):
                result = self._result(micro_batch)
        losses, weights = [], []
        if self.names != (None,) and len(result) != len(self.names):
            raise ValueError("the loss has other terms than before")
        for name in self.names:
            loss, weight = _part(result, name)
            if (weight is None) is self.told:
                raise ValueError("the loss comes with a weight in some passes only")
            losses.append(_wide(loss.reshape(())))
            weights.append(weight.detach().reshape(()) if isinstance(weight, Tensor) else weight)
        return losses, weights

    def _result(self, micro_batch: tuple[Any, ...]) -> Any:
        if self.compute_loss is not None:
            return self.compute_loss(self.model, *micro_batch)
        outputs = self.model(micro_batch[0])
        if self.summed and isinstance(outputs, Tensor) and outputs.dtype is torch.float16:
            outputs = outputs.float()  # a sum of losses soon exceeds 65504
        values = list(_unpacked(outputs))
        for targets in micro_batch[1:]:
            values += _unpacked(targets)
        return self.loss_fn(*values)


def _part(result: Any, name: Any) -> tuple[Any, Any]:
    """The loss of this name, and its weight, if it comes with one."""
    if isinstance(result, Tensor):
        return result, None
    if name is None:  # one loss: alone, with its weight, or as an attribute of a model's output
        return (result[0], result[1]) if isinstance(result, tuple) and len(result) == 2 else (result.loss, None)
    value = result[name]
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, None)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _unpacked(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) and not hasattr(values, "_fields") else (values,)


def _wide(loss: Tensor) -> Tensor:
    """In float32 at least: shares of half-precision losses are too small for it."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
