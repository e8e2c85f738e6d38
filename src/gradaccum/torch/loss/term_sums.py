"""A window of several losses, each divided by its own total when the window closes: a sum of gradients for each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.window import checked_weight
from gradaccum.errors import WindowError
from gradaccum.on_torch.foreach import all_finite, scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.torch.loss.terms import checked_scalar, no_terms_error

Accepting = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which the sum may be changed."""

NamedLoss = tuple[Hashable, Tensor, float]
"""A loss with its name before and its weight behind it."""

__all__ = [
    "NamedLoss",
    "TermSums",
    "checked_terms",
    "late_names_error",
    "mixed_terms_error",
    "not_by_name_error",
    "unscaled_terms_error",
]


class TermSums(GradientBuffer):
    """The sum in `p.grad`; with several losses that of the first one, and beside it a sum for each other one.

    What a window of several losses divides by is known when it closes, and is another number for each. Where there is
    one loss, or none that came by name, all is as it is in a `GradientBuffer`.
    """

    def __init__(self, *arguments: Any) -> None:
        self.used = False
        """Whether losses have ever come by name."""
        self.terms: dict[Hashable, _Term] = {}
        """By name, the one in `p.grad` first."""
        self._aside: list[Tensor | None] | None = None
        """The first term's sum, while another one's is in `p.grad`."""
        self._named: set[Hashable] = set()
        """The losses of the micro-batch in progress."""
        super().__init__(*arguments)

    def prepare(self) -> None:
        super().prepare()
        beside = [held for term in self.terms.values() for held in (term.sums, term.restored)]
        for held in (self.detached, self.restored, *beside):
            if held:  # the parameters that were added come last
                held += [None] * (len(self.parameters()) - len(held))

    @contextlib.contextmanager
    def reached(self, name: Hashable, accepting: Accepting) -> Iterator[None]:
        """Backward passes add to this term's sum."""
        term = self.terms[name]
        if term is self._first:
            yield
            return
        with accepting():
            self._aside = self.get()
            self.set(term.sums or [None] * len(self._aside))
            term.sums = []
        try:
            yield
        finally:
            with accepting():
                term.sums = self.get()
                self.set(self._aside)
                self._aside = None

    @property
    def _first(self) -> _Term | None:
        return next(iter(self.terms.values()), None)

    def weigh(self, name: Hashable, weight: float, reduction: str) -> float:
        """Count a loss of this term, and get what its gradient is multiplied by when it joins the term's sum."""
        term = self.terms.setdefault(name, _Term(weight if reduction == "mean" else 1.0))
        term.weights.append(weight)
        return weight / term.unit if reduction == "mean" else 1.0

    def backward(
        self,
        terms: list[NamedLoss],
        reduction: str,
        accepting: Accepting,
        run: Callable[..., None],
        retain_graph: bool | None = None,
        **how: Any,
    ) -> None:
        """Add the gradients of a micro-batch's losses, each to the sum of its term; detached ones have none."""
        counting = {name for name, _, weight in terms if weight}
        if twice := counting & self._named:
            raise _twice_error(twice.pop())
        self._named |= counting
        for index, (name, loss, weight) in enumerate(terms):
            if not weight:
                with accepting():
                    self.reach(loss)
                continue
            factor = self.weigh(name, weight, reduction)
            if not loss.requires_grad:
                continue
            keep = retain_graph or any(later and loss.requires_grad for _, loss, later in terms[index + 1 :])
            with self.reached(name, accepting):
                run(loss, factor, retain_graph=keep, **how)

    def micro_batch_over(self) -> None:
        """The next micro-batch has its own losses."""
        self._named.clear()

    def totals(self) -> dict[Hashable, float]:
        """What each term weighs in this window."""
        return {name: math.fsum(term.weights) for name, term in self.terms.items()}

    def fold(self, totals: Mapping[Hashable, float] | None = None) -> None:
        """Divide each term's sum by its total, over all ranks if they are given, and add them up in `p.grad`."""
        totals = self.totals() if totals is None else totals
        for name, term in self.terms.items():
            total = term.unit / totals[name]
            if term is self._first:
                scale_(self.gradients(), total)
                continue
            scale_([s for s in term.sums if s is not None], total)
            with torch.no_grad():
                held = zip(self.get(), term.sums or [None] * len(self.parameters()), strict=True)
                self.set(s if a is None else a if s is None else _added(a, s) for a, s in held)
            term.sums = []

    def expose(self, accepting: Accepting) -> None:
        """Have an overflow of any term in `p.grad`, where a GradScaler looks for it."""
        others = [s for term in self.terms.values() for s in term.sums if s is not None]
        shown = [g for g in self.gradients() if not g.is_sparse]
        if others and shown:
            smallest = min(shown, key=Tensor.numel)
            with torch.no_grad(), accepting():
                smallest += torch.where(all_finite(others).to(smallest.device), 0.0, math.inf).to(smallest.dtype)

    # The sum, with those beside it.

    def everything(self) -> list[Tensor]:
        beside = [s for term in self.terms.values() for s in [*term.sums, *(term.restored or ())]]
        return super().everything() + [s for s in [*beside, *(self._aside or ())] if s is not None]

    def join_restored(self, scale: Tensor | None = None) -> None:
        super().join_restored(scale)
        for term in self.terms.values():
            if term.restored is None:
                continue
            restored, term.restored = term.restored, None
            if scale is not None:
                scale_([s for s in restored if s is not None], scale)
            with torch.no_grad():
                held = zip(term.sums or [None] * len(restored), restored, strict=True)
                term.sums = [r if a is None else a if r is None else _added(a, r) for a, r in held]

    def detach(self) -> None:
        terms = self.terms
        super().detach()
        self.terms = terms

    def clear(self, set_to_none: bool = True) -> None:
        super().clear(set_to_none)
        self.terms = {}
        self._named.clear()

    def close(self) -> None:
        super().close()
        self.terms = {}
        self._named.clear()

    # Files.

    def state_of_terms(self, scale: Tensor | None) -> list[dict[str, Any]]:
        """Each term's name, weights and sum, copied; the first one's sum is `copies`."""
        return [
            {
                "name": name,
                "weights": list(term.weights),
                "unit": term.unit,
                "gradients": {
                    index: s.clone() if scale is None or term.restored else s * scale.reciprocal().to(s.device, s.dtype)
                    for index, s in enumerate(term.restored or term.sums)
                    if s is not None
                },
            }
            for name, term in self.terms.items()
        ]

    def load_terms(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `state_of_terms` wrote."""
        parameters = self.parameters()
        self.used = self.used or bool(state)
        for saved in state:
            term = self.terms[saved["name"]] = _Term(saved["unit"])
            term.weights = list(saved["weights"])
            found = saved["gradients"]
            if found:
                term.restored = [
                    found[index].detach().to(p.device, copy=True) if index in found else None
                    for index, p in enumerate(parameters)
                ]


class _Term:
    """One of several losses in an open window."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        """What its sum is a multiple of: its first weight."""
        self.weights: list[float] = []
        self.sums: list[Tensor | None] = []
        """Of each parameter, beside `p.grad`; nothing for the first term."""
        self.restored: list[Tensor | None] | None = None
        """A checkpoint's sum, until the next micro-batch is in."""


def _added(one: Tensor, other: Tensor) -> Tensor:
    if one.is_sparse or other.is_sparse:
        return one + other
    return one.add_(other.to(one.dtype))


def checked_terms(losses: Any, weight: Any) -> list[NamedLoss]:
    """A micro-batch's losses with their names and weights."""
    if weight is not None:
        raise not_by_name_error()
    named = list(losses.items() if isinstance(losses, Mapping) else enumerate(losses))
    if not named:
        raise no_terms_error(losses)
    return [(name, *_checked(name, value)) for name, value in named]


def _checked(name: Hashable, value: Any) -> tuple[Tensor, float]:
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise ValueError(
            f"The loss term {name!r} comes without its weight. Received: {type(value).__name__}. Each of several "
            "losses needs what it is a mean over: backward({name: (loss, weight)}), such as (loss, len(x))."
        )
    loss = checked_scalar(value[0], f"The loss term {name!r}")
    try:
        return loss, checked_weight(value[1])
    except (TypeError, ValueError) as error:
        raise type(error)(f"The loss term {name!r}: {error}") from None


def _twice_error(name: Hashable) -> ValueError:
    """A name was given to two losses of one micro-batch."""
    return ValueError(
        f"The loss term {name!r} came twice in one micro-batch: two means over the same rows, whose sum one weight "
        "can't say. Give each a name of its own, or add them up before: backward({'a': (loss_1 + loss_2, weight)})."
    )


def not_by_name_error() -> ValueError:
    """Losses came by name where they cannot."""
    return ValueError(
        "Losses that come by name, backward({name: (loss, weight)}), have a weight each, so there is none for all of "
        "them: neither beside them nor in batches(). Each takes a sum of gradients of its own, which sharded models, "
        'nonfinite="skip_micro_batch" and noise_scale=True do not go together with. TrainStep takes them there: its '
        "compute_loss may return the same."
    )


def late_names_error() -> WindowError:
    """Losses come by name for the first time, on ranks whose backward passes reduce single losses by now."""
    return WindowError(
        "Losses came as backward({name: (loss, weight)}) for the first time in a later window than the first, on "
        "several ranks, which reduce a single loss in the backward pass by now. Use names from the first window on."
    )


def mixed_terms_error() -> WindowError:
    """A single loss came where others came by name."""
    return WindowError(
        "Some losses of this window came as backward({name: (loss, weight)}), others as a single loss, which belongs "
        "to no name. Use one of the two for all of them. discard() drops the window."
    )


def unscaled_terms_error() -> WindowError:
    """A GradScaler has unscaled one of several sums."""
    return WindowError(
        "scaler.unscale_() reaches one of the sums that losses by name have, and not the others. Leave it out: the "
        "wrapper unscales, and clips with clip_grad_norm=. discard() drops the window."
    )
