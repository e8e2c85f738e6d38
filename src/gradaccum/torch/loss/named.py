"""Losses by name, each with a weight of its own, as users give them: what `compute_loss` returns.

Beside it, the arithmetic of weights, which are numbers, or tensors where reading them would wait for a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.core.window import checked_weight
from gradaccum.on_torch.arguments import checked_scalar

MIXED_TERMS = "`compute_loss` must return {name: (loss, weight)} always or never. Received: both."


Weight = float | Tensor
"""What a mean loss is a mean over: a number, or a tensor where reading it would wait for its device."""


class Term(NamedTuple):
    loss: Tensor
    weight: Any  # what it is a mean over: a `Weight`; None where the batch says so, by `weight`


Terms = dict[Hashable, Term]
Totals = dict[Hashable, Weight]
"""What each term divides by, by its name."""


def terms_of(result: Any, by_batch: bool) -> Terms | None:
    if type(result) is tuple and result and all(isinstance(pair, (tuple, list)) for pair in result):
        raise TypeError(
            "Return several losses as {name: (loss, weight)} or a list of pairs: a tuple is one loss with its weight. "
            f"Received: a tuple of {len(result)} pairs."
        )
    if not isinstance(result, (Mapping, list)) or hasattr(result, "loss"):  # as transformers' outputs, mappings
        return None
    return {name: _term(name, value, by_batch) for name, value in _named(result)}


def totals_of(weights: Any) -> Totals | None:
    """What a user's `weight(*batch)` says about terms, checked; None where it is a number."""
    if not isinstance(weights, (Mapping, list)):
        return None
    named = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    return {name: _weight(name, weight) for name, weight in named}


def _named(received: Any) -> Iterable[tuple[Any, Any]]:
    if not received:
        raise ValueError(
            f"The loss has no terms. Received: {received!r}. If these rows have none of the losses, return them with a "
            "weight of 0, such as {'a': (loss, 0)}; their values don't matter then."
        )
    return received.items() if isinstance(received, Mapping) else enumerate(received)


def _term(name: Any, value: Any, by_batch: bool = False) -> Term:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if pair and by_batch:
        raise ValueError(
            f"The loss term {name!r} comes as (loss, weight), and `weight` is given too. Use one of them for all terms."
        )
    if not pair and not by_batch:
        received = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"The loss term {name!r} comes without its weight. Received: {received}. Each of several losses needs what "
            "it is a mean over: return {name: (loss, weight)}, such as (loss, len(x)); or return {name: loss} and give "
            "weight=lambda *batch: {name: number}."
        )
    loss, weight = value if pair else (value, None)
    return Term(checked_scalar(loss, f"The loss term {name!r}"), _weight(name, weight) if pair else None)


def _weight(name: Any, weight: Any) -> Weight:
    try:
        return plain_weight(weight)
    except (TypeError, ValueError) as error:
        raise type(error)(f"The loss term {name!r}: {error}") from None


def weighed(terms: Terms, by_batch: Totals | None) -> dict[Hashable, tuple[Tensor, Weight]]:
    """Terms with their weights, from wherever they come; those that weigh nothing are left out."""
    if by_batch is not None:
        for name in terms:
            if name not in by_batch:
                raise ValueError(f"`weight` has no entry for the loss term {name!r}. It returned {list(by_batch)}.")
        for name, weight in by_batch.items():
            if name not in terms and float(weight) > 0:
                raise ValueError(
                    f"`weight` gives {float(weight):g} for the loss term {name!r}, but the loss has no such term here. "
                    f"It has {list(terms)}. Where a term is missing from some rows, it weighs 0 there."
                )
    found = {name: (loss, weight if by_batch is None else by_batch[name]) for name, (loss, weight) in terms.items()}
    return {name: (loss, weight) for name, (loss, weight) in found.items() if not is_zero(weight)}


def read_totals(weights: Mapping[Hashable, Iterable[Weight]]) -> dict[Hashable, float]:
    """Each term's sum of weights: one wait for a device, where some are there."""
    everything = {name: [*listed] for name, listed in weights.items()}
    waiting = [w for listed in everything.values() for w in listed if isinstance(w, Tensor)]
    read = iter(torch.stack([w.double().to(waiting[0].device) for w in waiting]).tolist() if waiting else [])
    totals = {}
    for name, listed in everything.items():
        numbers = [next(read) if isinstance(w, Tensor) else w for w in listed]
        for number in numbers:
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"The loss term {name!r}: a weight must be a finite number >= 0. Received: {number}.")
        totals[name] = math.fsum(numbers)
    return totals


def added(terms: Terms, totals: Totals | None = None, divided: bool = False) -> Tensor:
    found = weighed(terms, totals) if totals is not None or all(t.weight is not None for t in terms.values()) else {}
    values = [
        times(wide(where_any(loss, weight)), ratio(1.0, weight) if divided else 1.0) for loss, weight in found.values()
    ]
    first, *others = values or [wide(term.loss) for term in terms.values()]
    for value in others:
        first = first + value.to(first.device)
    return first


def wide(loss: Tensor) -> Tensor:
    """In float32 at least: shares of half-precision losses are too small for it."""
    if loss.dtype in (torch.float32, torch.float64):  # as most are
        return loss
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


Entry = tuple[Tensor, Weight, int]
"""A loss, without its graph; how often it counts; and in which micro-batch it came."""


def weighted_sum(losses: list[Entry], divisor: Weight = 1.0) -> Tensor:
    """`sum_i times_i * loss_i / divisor` of scalars: in float64 where that waits for no device, else there."""
    total, dtypes = 0.0, set[torch.dtype]()
    for loss, times_, _ in losses:
        if type(loss) is not Tensor or not loss.is_cpu:
            break
        total += loss.item() * (times_ if type(times_) is float else float(times_))
        dtypes |= {loss.dtype}
    else:
        dtype = dtypes.pop() if len(dtypes) == 1 else functools.reduce(torch.promote_types, dtypes)
        return torch.scalar_tensor(total / float(divisor) if divisor else 0.0, dtype=dtype)
    groups: dict[Any, tuple[Weight, list[Tensor]]] = {}
    for loss, times_, _ in losses:
        key = id(times_) if isinstance(times_, Tensor) else times_
        groups.setdefault(key, (times_, []))[1].append(loss)
    each = [times(_stacked(group), ratio(times_, divisor)) for times_, group in groups.values()]
    return _stacked([one.to(each[0].device) for one in each])


def _stacked(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


# Arithmetic with weights.


def plain_weight(weight: Any) -> Weight:
    waits = isinstance(weight, Tensor) and (weight.device.type != "cpu" or hasattr(weight, "fake_mode"))
    if waits and weight.numel() == 1 and not weight.requires_grad and weight.dtype is not torch.bool:
        return weight.reshape(())
    return checked_weight(weight)


def is_zero(weight: Any) -> bool:
    return isinstance(weight, float) and weight == 0


def ratio(weight: Weight, total: Weight) -> Weight:
    """`weight / total`, in float64; 0 where nothing weighs anything."""
    if isinstance(weight, Tensor) or isinstance(total, Tensor):
        weight, total = (torch.as_tensor(x, dtype=torch.float64) for x in (weight, total))
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
