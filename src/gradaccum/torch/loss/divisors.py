"""What each `torch.nn` loss divides by.

Most losses of `torch.nn` are means over rows (or over the elements of rows of one size, which is the same). Cross
entropy and negative log-likelihood are not: with class indices as targets they divide by the sum of the class weights
of the targets that are not ignored. Their micro-batches are exact as sums, divided by that number for the whole batch;
so a micro-batch with nothing but ignored targets is a plain zero, where its mean would be 0 / 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.window import checked_weight
from gradaccum.on_torch.batch import Batch

__all__ = [
    "Weight",
    "check_row_weights",
    "divides_by_targets",
    "divisor",
    "is_zero",
    "plain_weight",
    "ratio",
    "reduction_of",
    "summed",
    "times",
    "where_any",
    "with_known_divisor",
]

Weight = float | Tensor
"""What a mean loss is a mean over: a number, or a tensor where reading it would wait for its device."""

_BY_TARGETS: tuple[type[nn.Module], ...] = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "NLLLoss2d", "LinearCrossEntropyLoss")
    if hasattr(nn, name)
)
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    nn.functional.cross_entropy: nn.CrossEntropyLoss,
    nn.functional.nll_loss: nn.NLLLoss,
}


def with_known_divisor(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`loss_fn`, or the loss module that does the same where it is a function with a divisor of its own.

    Example:
        >>> with_known_divisor(functools.partial(nn.functional.cross_entropy, ignore_index=0))
        CrossEntropyLoss()
    """
    function, keywords = loss_fn, {}
    if isinstance(loss_fn, functools.partial) and not loss_fn.args:
        function, keywords = loss_fn.func, loss_fn.keywords
    module = _FUNCTIONS.get(function) if callable(getattr(function, "__hash__", None)) else None
    return module(**keywords) if module is not None else loss_fn


def reduction_of(loss_fn: Callable[..., Any]) -> str | None:
    """`"mean"` or `"sum"` where `loss_fn` tells; None where it doesn't."""
    reduction = None
    if isinstance(loss_fn, nn.Module):
        reduction = getattr(loss_fn, "reduction", None)
    elif isinstance(loss_fn, functools.partial):
        reduction = loss_fn.keywords.get("reduction")
    if reduction == "none":
        raise ValueError(
            f"`loss_fn` must return one number. Received: {loss_fn!r} with reduction='none', which returns one per "
            "row. Use 'mean' or 'sum', or reduce it yourself in `compute_loss`."
        )
    return {"mean": "mean", "batchmean": "mean", "elementwise_mean": "mean", "sum": "sum"}.get(str(reduction))


def divides_by_targets(loss_fn: Any) -> bool:
    """Whether this loss, where its targets are class indices, divides by a number that depends on them, not by rows."""
    # A subclass with a forward of its own may divide by anything.
    return isinstance(loss_fn, _BY_TARGETS) and any(type(loss_fn).forward is loss.forward for loss in _BY_TARGETS)


def check_row_weights(loss_fn: Any, outputs: Any) -> None:
    """After a loss has failed: raise if it holds a number for each row of the batch."""
    rows = len(outputs) if isinstance(outputs, Tensor) and outputs.dim() else 0
    module = not isinstance(loss_fn, functools.partial)
    held = {**vars(loss_fn), **dict(loss_fn.named_buffers())} if isinstance(loss_fn, nn.Module) else {}
    for name in ("weight", "pos_weight"):
        value = (held if module else loss_fn.keywords).get(name)
        if rows and isinstance(value, Tensor) and value.dim() and len(value) > rows and len(value) not in outputs.shape:
            function = (type(loss_fn) if module else loss_fn.func).__name__
            raise ValueError(
                f"{function}({name}=...) holds a {name} for each of {len(value)} rows, and was given {rows} rows: "
                "micro-batches are cut out of the batch, and what the loss holds is not. Make it a part of the batch: "
                f"compute_loss=lambda model, x, y, w: loss_fn(model(x), y, {name}=w) with a function of "
                "torch.nn.functional as loss_fn, and step(x, y, w)."
            )


def divisor(loss_fn: Any, targets: Tensor, batch: Batch | None = None) -> Weight:
    """What such a loss divides by on these targets, a tensor where that spares waiting for their device.

        sum of weight[t]  over the class indices t that are not ignore_index      (weight is 1 without class weights)
        their number      where targets are class probabilities

    Example:
        >>> loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), ignore_index=-1)
        >>> divisor(loss_fn, torch.tensor([0, 1, 1, -1]))
        tensor(7.)
    """
    if targets.is_floating_point():
        return float(targets.numel() // max(targets.shape[min(1, targets.ndim - 1)], 1))
    ignored = -100 if loss_fn.ignore_index is None else loss_fn.ignore_index
    if loss_fn.weight is not None:
        valid = targets != ignored
        class_weights = loss_fn.weight.detach().to(targets.device)
        return torch.where(valid, class_weights[torch.where(valid, targets, 0)], 0.0).sum()
    if targets.is_cpu and targets.numel() and ignored < 0 <= (batch or Batch(())).ends(targets)[0]:
        return float(targets.numel())  # one look in place of two: nothing is ignored, as mostly
    return (targets != ignored).sum()


def summed(loss_fn: Callable[..., Any], before: Any = None) -> Callable[..., Any]:
    new: Any = object.__new__(type(loss_fn)) if before is None else before
    new.__dict__.update(loss_fn.__dict__, reduction="sum")
    return new


# Arithmetic with weights.


def plain_weight(weight: Any) -> Weight:
    waits = isinstance(weight, Tensor) and weight.device.type != "cpu" and weight.numel() == 1
    if waits and not weight.requires_grad and weight.dtype is not torch.bool:
        return weight.reshape(())
    return checked_weight(weight)


def is_zero(weight: Any) -> bool:
    return isinstance(weight, float) and weight == 0


def ratio(weight: Weight, total: Weight) -> Weight:
    """`weight / total`, in float64; 0 where nothing weighs anything."""
    if isinstance(weight, Tensor) or isinstance(total, Tensor):
        weight, total = torch.as_tensor(weight).double(), torch.as_tensor(total).double()
        weight, total = (x.to(weight.device if total.device.type == "cpu" else total.device) for x in (weight, total))
        return torch.where(total > 0, weight / total, 0.0)
    return weight / total if total else 0.0


def where_any(loss: Tensor, weight: Weight) -> Tensor:
    """The loss; 0 where it is a mean over nothing, which is NaN."""
    return torch.where(weight.to(loss.device) > 0, loss, 0.0) if isinstance(weight, Tensor) else loss


def times(value: Tensor, factor: Weight) -> Tensor:
    if isinstance(factor, Tensor):
        return value * factor.to(value.device, value.dtype)
    return value if factor == 1 else value * factor
