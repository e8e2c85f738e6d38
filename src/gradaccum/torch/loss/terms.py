"""Several losses, each with a denominator of its own: the terms that `compute_loss` returns.

large batch's loss  =  sum_j  sum_i w_ij l_ij / sum_i w_ij       over terms j and micro-batches i
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.torch.loss.divisors import Weight, is_zero, plain_weight, ratio, times, where_any

__all__ = [
    "MIXED_TERMS",
    "Found",
    "Term",
    "Terms",
    "Totals",
    "added",
    "checked_scalar",
    "no_gradient_error",
    "no_terms_error",
    "summed",
    "terms_of",
    "totals_of",
    "weighed",
    "wide",
]


MIXED_TERMS = "`compute_loss` must return {name: (loss, weight)} always or never. Received: both."


class Term(NamedTuple):
    """One of several losses of a micro-batch."""

    loss: Tensor
    weight: Weight | None
    """What it is a mean over; None where the batch says so, by `weight`."""


Terms = dict[Hashable, Term]
Totals = dict[Hashable, Weight]
"""What each term divides by, by its name."""


class Found:
    """What the first forward pass has shown of a loss; shared by all that compute it."""

    terms: bool | None = None
    """Whether it consists of terms; None before."""
    needs_gradients = False
    """Whether it can't be computed without gradients."""


def terms_of(result: Any, by_batch: bool) -> Terms | None:
    """The terms that `compute_loss` has returned; None where it returned one loss.

    Example:
        >>> terms = terms_of({"tokens": (torch.tensor(2.0), 30), "aux": (torch.tensor(1.0), 4)}, by_batch=False)
        >>> terms["tokens"].weight
        30.0
    """
    if isinstance(result, Mapping) and not hasattr(result, "loss"):  # transformers' outputs are mappings with one
        named: Iterable[tuple[Any, Any]] = result.items()
    elif isinstance(result, list):
        named = enumerate(result)
    elif type(result) is tuple and result and all(isinstance(pair, (tuple, list)) for pair in result):
        raise TypeError(
            "Several losses come as {name: (loss, weight)} or as a list of pairs; a tuple is one loss with its weight. "
            f"Received: a tuple of {len(result)} pairs."
        )
    else:
        return None
    terms = {name: _term(name, value, by_batch) for name, value in named}
    if not terms:
        raise no_terms_error(result)
    return terms


def no_terms_error(received: Any) -> ValueError:
    """A micro-batch, or a batch, has none of its losses."""
    return ValueError(
        f"The loss has no terms. Received: {received!r}. Where these rows have none of them, say so by a weight of 0: "
        "{'a': (loss, 0)}, whatever the loss is."
    )


def no_gradient_error(names: Iterable[Hashable]) -> ValueError:
    """None of several losses depends on the model."""
    return ValueError(
        f"None of the losses requires a gradient: {', '.join(map(repr, names))}. Losses that are detached are averaged "
        "beside others, which train the model."
    )


def _term(name: Any, value: Any, by_batch: bool) -> Term:
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
    return Term(checked_scalar(loss, f"The loss term {name!r}"), _weight_of(name, weight) if pair else None)


def checked_scalar(loss: Any, what: str = "The loss") -> Tensor:
    """A loss of one element, without its dimensions."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"{what} must be a tensor. Received: loss={loss!r} of type {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"{what} must be a scalar, the mean or the sum over its rows. Received: shape {tuple(loss.shape)}."
        )
    return loss.reshape(()) if loss.dim() else loss


def _weight_of(name: Any, weight: Any) -> Weight:
    try:
        return plain_weight(weight)
    except (TypeError, ValueError) as error:
        raise type(error)(f"The loss term {name!r}: {error}") from None


def totals_of(weights: Any) -> Totals | None:
    """What a user's `weight(*batch)` says about terms, checked; None where it is a number."""
    if isinstance(weights, Mapping):
        return {name: _weight_of(name, weight) for name, weight in weights.items()}
    if isinstance(weights, list):
        return {name: _weight_of(name, weight) for name, weight in enumerate(weights)}
    return None


def weighed(terms: Terms, by_batch: Totals | None) -> dict[Hashable, tuple[Tensor, Weight]]:
    """Terms with their weights, from wherever they come; those that weigh nothing are left out."""
    if by_batch is None:
        found = {name: (loss, weight) for name, (loss, weight) in terms.items() if weight is not None}
        assert len(found) == len(terms)
    else:
        for name in terms:
            if name not in by_batch:
                raise ValueError(f"`weight` says nothing about the loss term {name!r}. It names {list(by_batch)}.")
        for name, weight in by_batch.items():
            if name not in terms and float(weight) > 0:
                raise ValueError(
                    f"`weight` says {float(weight):g} for the loss term {name!r}, and the loss has no such term here. "
                    f"It has {list(terms)}. Where a term is missing from some rows, it weighs 0 there."
                )
        found = {name: (term.loss, by_batch[name]) for name, term in terms.items()}
    return {name: (loss, weight) for name, (loss, weight) in found.items() if not is_zero(weight)}


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
