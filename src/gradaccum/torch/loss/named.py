"""Several losses by name, each with a weight of its own: what `compute_loss` returns, and what `backward` takes.

large batch's loss  =  sum_j  sum_i w_ij l_ij / sum_i w_ij       over names j and micro-batches i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.core.window import checked_weight
from gradaccum.errors import WindowError
from gradaccum.torch.loss.divisors import Weight, is_zero, plain_weight, ratio, times, where_any

__all__ = [
    "MIXED_TERMS",
    "Term",
    "Terms",
    "Totals",
    "added",
    "checked_scalar",
    "checked_terms",
    "mixed_terms_error",
    "not_by_name_error",
    "read_totals",
    "summed",
    "terms_of",
    "totals_of",
    "weighed",
    "weighted_sum",
    "wide",
]


MIXED_TERMS = "`compute_loss` must return {name: (loss, weight)} always or never. Received: both."


class Term(NamedTuple):
    loss: Tensor
    weight: Any
    """What it is a mean over: a `Weight`; None where the batch says so, by `weight`."""


Terms = dict[Hashable, Term]
Totals = dict[Hashable, Weight]
"""What each term divides by, by its name."""


def terms_of(result: Any, by_batch: bool) -> Terms | None:
    """The terms that `compute_loss` has returned; None where it returned one loss."""
    if type(result) is tuple and result and all(isinstance(pair, (tuple, list)) for pair in result):
        raise TypeError(
            "Several losses come as {name: (loss, weight)} or as a list of pairs; a tuple is one loss with its weight. "
            f"Received: a tuple of {len(result)} pairs."
        )
    if not isinstance(result, (Mapping, list)) or hasattr(result, "loss"):  # as transformers' outputs, mappings
        return None
    return {name: _term(name, value, plain_weight, by_batch) for name, value in _named(result)}


def checked_terms(losses: Any, weight: Any) -> Terms:
    """The losses that `backward` was given, with their weights as numbers."""
    if weight is not None:
        raise not_by_name_error()
    return {name: _term(name, value, checked_weight) for name, value in _named(losses)}


def totals_of(weights: Any) -> Totals | None:
    """What a user's `weight(*batch)` says about terms, checked; None where it is a number."""
    if not isinstance(weights, (Mapping, list)):
        return None
    named = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    return {name: _weight(name, weight, plain_weight) for name, weight in named}


def _named(received: Any) -> Iterable[tuple[Any, Any]]:
    if not received:
        raise ValueError(
            f"The loss has no terms. Received: {received!r}. Where these rows have none of them, say so by a weight of "
            "0: {'a': (loss, 0)}, whatever the loss is."
        )
    return received.items() if isinstance(received, Mapping) else enumerate(received)


def _term(name: Any, value: Any, read: Callable[[Any], Weight], by_batch: bool = False) -> Term:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if pair and by_batch:
        raise ValueError(
            f"The loss term {name!r} comes as (loss, weight), and `weight` is given too. Use one of them for all terms."
        )
    if not pair and not by_batch:
        received = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        in_turn = "backward({name: (loss, weight)}), such as (loss, len(x))."
        at_once = (
            "return {name: (loss, weight)}, such as (loss, len(x)); or return {name: loss} and give "
            "weight=lambda *batch: {name: number}."
        )
        raise ValueError(
            f"The loss term {name!r} comes without its weight. Received: {received}. Each of several losses needs what "
            f"it is a mean over: {in_turn if read is checked_weight else at_once}"
        )
    loss, weight = value if pair else (value, None)
    return Term(checked_scalar(loss, f"The loss term {name!r}"), _weight(name, weight, read) if pair else None)


def _weight(name: Any, weight: Any, read: Callable[[Any], Weight]) -> Weight:
    try:
        return read(weight)
    except (TypeError, ValueError) as error:
        raise type(error)(f"The loss term {name!r}: {error}") from None


def checked_scalar(loss: Any, what: str = "The loss") -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"{what} must be a tensor. Received: loss={loss!r} of type {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"{what} must be a scalar, the mean or the sum over its rows. Received: shape {tuple(loss.shape)}."
        )
    return loss.reshape(()) if loss.dim() else loss


def weighed(terms: Terms, by_batch: Totals | None) -> dict[Hashable, tuple[Tensor, Weight]]:
    """Terms with their weights, from wherever they come; those that weigh nothing are left out."""
    if by_batch is not None:
        for name in terms:
            if name not in by_batch:
                raise ValueError(f"`weight` says nothing about the loss term {name!r}. It names {list(by_batch)}.")
        for name, weight in by_batch.items():
            if name not in terms and float(weight) > 0:
                raise ValueError(
                    f"`weight` says {float(weight):g} for the loss term {name!r}, and the loss has no such term here. "
                    f"It has {list(terms)}. Where a term is missing from some rows, it weighs 0 there."
                )
    found = {name: (loss, weight if by_batch is None else by_batch[name]) for name, (loss, weight) in terms.items()}
    return {name: (loss, weight) for name, (loss, weight) in found.items() if not is_zero(weight)}


def read_totals(weights: dict[Hashable, list[Weight]]) -> dict[Hashable, float]:
    """Each term's sum of weights: one wait for a device, where some are there."""
    waiting = [w for listed in weights.values() for w in listed if isinstance(w, Tensor)]
    read = iter(torch.stack([w.double().to(waiting[0].device) for w in waiting]).tolist() if waiting else [])
    totals = {}
    for name, listed in weights.items():
        numbers = [next(read) if isinstance(w, Tensor) else w for w in listed]
        for number in numbers:
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"The loss term {name!r}: a weight must be a finite number >= 0. Received: {number}.")
        totals[name] = math.fsum(numbers)
    return totals


def added(terms: Terms, totals: Totals | None = None, divided: bool = False) -> Tensor:
    """The terms' sum: of a batch at once."""
    found = weighed(terms, totals) if totals is not None or all(t.weight is not None for t in terms.values()) else {}
    values = [
        times(wide(where_any(loss, weight)), ratio(1.0, weight) if divided else 1.0) for loss, weight in found.values()
    ]
    return summed(values or [wide(term.loss) for term in terms.values()])


def wide(loss: Tensor) -> Tensor:
    """In float32 at least: shares of half-precision losses are too small for it."""
    if loss.dtype in (torch.float32, torch.float64):  # as most are
        return loss
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def summed(values: list[Tensor]) -> Tensor:
    """The sum of scalars that may be on several devices."""
    total = values[0]
    for value in values[1:]:
        total = total + (value if value.device == total.device else value.to(total.device))
    return total


def weighted_sum(losses: list[tuple[Tensor, Weight]]) -> Tensor:
    """`sum_i factor_i * loss_i` of scalars: in float64 where that waits for no device, else there."""
    if all(type(loss) is Tensor and loss.is_cpu for loss, _ in losses):
        total, dtype = 0.0, losses[0][0].dtype
        for loss, factor in losses:
            total += loss.item() * float(factor)
            dtype = dtype if loss.dtype == dtype else torch.promote_types(dtype, loss.dtype)
        return torch.scalar_tensor(total, dtype=dtype)
    groups: dict[Any, tuple[Weight, list[Tensor]]] = {}
    for loss, factor in losses:
        groups.setdefault(id(factor) if isinstance(factor, Tensor) else factor, (factor, []))[1].append(loss)
    each = [times(_stacked(group), factor) for factor, group in groups.values()]
    return _stacked([one.to(each[0].device) for one in each])


def _stacked(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


# What is refused.


def not_by_name_error() -> ValueError:
    return ValueError(
        "Losses that come by name, backward({name: (loss, weight)}), have a weight each, so there is none for all of "
        "them: neither beside them nor in batches(). Each takes a sum of gradients of its own, which sharded models, "
        'nonfinite="skip_micro_batch" and noise_scale=True do not go together with. TrainStep takes them there: its '
        "compute_loss may return the same."
    )


def mixed_terms_error() -> WindowError:
    return WindowError(
        "Some losses of this window came as backward({name: (loss, weight)}), others as a single loss, which belongs "
        "to no name. Use one of the two for all of them. discard() drops the window."
    )
