"""Several losses by name, each with a weight of its own: what `compute_loss` returns, and what `backward` takes.

large batch's loss  =  sum_j  sum_i w_ij l_ij / sum_i w_ij       over names j and micro-batches i

`TrainStep` knows the totals before the first backward pass, so that all gradients add up in one place. A wrapped
optimizer's window knows them when it closes: until then each loss has a sum of gradients of its own (`NamedSums`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.core.window import Reduction, checked_weight
from gradaccum.errors import WindowError
from gradaccum.on_torch.foreach import all_finite, scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer

MIXED_TERMS = "`compute_loss` must return {name: (loss, weight)} always or never. Received: both."


Weight = float | Tensor
"""What a mean loss is a mean over: a number, or a tensor where reading it would wait for its device."""


class Term(NamedTuple):
    loss: Tensor
    weight: Any  # what it is a mean over: a `Weight`; None where the batch says so, by `weight`


Terms = dict[Hashable, Term]
Totals = dict[Hashable, Weight]
"""What each term divides by, by its name."""
Resyncing = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which the sum may be changed."""


def terms_of(result: Any, by_batch: bool) -> Terms | None:
    if type(result) is tuple and result and all(isinstance(pair, (tuple, list)) for pair in result):
        raise TypeError(
            "Return several losses as {name: (loss, weight)} or a list of pairs: a tuple is one loss with its weight. "
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
            f"The loss has no terms. Received: {received!r}. If these rows have none of the losses, return them with a "
            "weight of 0, such as {'a': (loss, 0)}; their values don't matter then."
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
                raise ValueError(f"`weight` has no entry for the loss term {name!r}. It returned {list(by_batch)}.")
        for name, weight in by_batch.items():
            if name not in terms and float(weight) > 0:
                raise ValueError(
                    f"`weight` gives {float(weight):g} for the loss term {name!r}, but the loss has no such term here. "
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
    total = values[0]
    for value in values[1:]:
        total = total + (value if value.device == total.device else value.to(total.device))
    return total


def weighted_sum(losses: list[tuple[Tensor, Weight]]) -> Tensor:
    """`sum_i factor_i * loss_i` of scalars: in float64 where that waits for no device, else there."""
    if all([type(loss) is Tensor and loss.is_cpu for loss, _ in losses]):
        dtypes = {loss.dtype for loss, _ in losses}
        dtype = dtypes.pop() if len(dtypes) == 1 else functools.reduce(torch.promote_types, dtypes)
        return torch.scalar_tensor(sum([loss.item() * float(factor) for loss, factor in losses]), dtype=dtype)
    groups: dict[Any, tuple[Weight, list[Tensor]]] = {}
    for loss, factor in losses:
        groups.setdefault(id(factor) if isinstance(factor, Tensor) else factor, (factor, []))[1].append(loss)
    each = [times(_stacked(group), factor) for factor, group in groups.values()]
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


# A wrapped optimizer's window.


class WindowLosses:
    """The losses of a window's micro-batches, by name, and what each weighs. They stay until the next window begins.

    Single losses have the name None. Nothing is computed until somebody asks.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.restart()

    def restart(self) -> None:
        self.entries: list[tuple[int, Tensor, float, Hashable]] = []  # number of the micro-batch, loss, weight, name
        self.weighed = self.over = False  # over: the window has closed
        self.dropped: set[int] = set()

    def add(self, micro_batch: int, loss: Tensor, weight: float, given: bool, name: Hashable = None) -> None:
        if self.over:
            self.restart()
        self.entries.append((micro_batch, loss.detach(), weight, name))
        self.weighed = self.weighed or given

    def unscale(self, micro_batch: int, scale: Tensor | None, live: Tensor | None) -> None:
        """Losses of this micro-batch came multiplied by a GradScaler's scale: the last one known after `unscale_`."""
        if (scale := live if scale is None else scale) is None:
            self.restart()
            return
        self.entries = [(i, loss / scale if i == micro_batch else loss, w, n) for i, loss, w, n in self.entries]

    def names(self, micro_batch: int) -> set[Hashable]:
        return {name for index, _, _, name in self.entries if index == micro_batch}

    def weights(self, name: Hashable) -> list[float]:
        return [weight for _, _, weight, of in self.entries if of == name]

    def means(self) -> dict[Hashable, Tensor]:
        """The window's mean of the losses of each name, of no dimensions."""
        named: dict[Hashable, list[tuple[int, Tensor, float]]] = {}
        for index, loss, weight, name in self.entries:
            if index not in self.dropped:
                named.setdefault(name, []).append((index, loss.reshape(()), weight))
        return {name: self._mean(entries, name) for name, entries in named.items()}

    def _mean(self, entries: list[tuple[int, Tensor, float]], name: Hashable) -> Tensor:
        # Losses without a name have the micro-batch's weight, which counts once.
        weights = {number if name is not None else one[0]: one[2] for number, one in enumerate(entries)}
        total = math.fsum(weights.values())
        if self.reduction == "sum":
            return weighted_sum([(loss, 1 / total if self.weighed else 1.0) for _, loss, _ in entries])
        return weighted_sum([(loss, weight / total) for _, loss, weight in entries])

    def mean(self) -> Tensor | None:
        means = list(self.means().values())
        return torch.stack(means).sum() if len(means) > 1 else means[0] if means else None

    def state_dict(self) -> dict[str, Any]:
        losses = [[i, loss.clone(), w] if n is None else [i, loss.clone(), w, n] for i, loss, w, n in self.entries]
        return {"losses": losses, "losses_weighed": self.weighed}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.restart()
        for index, loss, weight, *name in state["losses"]:
            self.add(index, loss.to(device, copy=True), weight, state["losses_weighed"], name[0] if name else None)


class NamedSums(GradientBuffer):
    """The sum in `p.grad`; with several losses that of the first one, and beside it a sum for each other one.

    What a window of several losses divides by is known when it closes, and is another number for each. Where no loss
    came by name, all is as it is in a `GradientBuffer`.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], dtype: torch.dtype | None, losses: WindowLosses) -> None:
        self.used = False  # whether losses have ever come by name
        self.sums: dict[Hashable, list[Tensor | None]] = {}
        """Of each loss, for each parameter; empty where it is in `p.grad`, or nothing has arrived."""
        self._restored: dict[Hashable, list[Tensor | None]] = {}
        """A checkpoint's sums, until the next micro-batch is in."""
        self._losses = losses
        super().__init__(parameters, dtype)

    def prepare(self) -> None:
        super().prepare()
        for held in (self.restored, *self.sums.values(), *self._restored.values()):
            if held:  # the parameters that were added come last
                held += [None] * (len(self.parameters()) - len(held))

    def backward(self, terms: Terms, resyncing: Resyncing, run: Callable[..., None], retain_graph: bool | None) -> None:
        """Add the gradients of a micro-batch's losses, each to its own sum; detached ones have none."""
        named = list(terms.items())
        for index, (name, (loss, weight)) in enumerate(named):
            if not weight:
                self.reach(loss)
                continue
            self.sums.setdefault(name, [])
            factor = weight / self._unit(name) if self._losses.reduction == "mean" else 1.0
            if loss.requires_grad:
                later = any(term.weight and term.loss.requires_grad for _, term in named[index + 1 :])
                with self._in_place(name, resyncing):
                    run(loss, factor, retain_graph or later)

    @contextlib.contextmanager
    def _in_place(self, name: Hashable, resyncing: Resyncing) -> Iterator[None]:
        first = next(iter(self.sums))
        if name != first:
            self._swap(first, name, resyncing)
        try:
            yield
        finally:
            if name != first:
                self._swap(name, first, resyncing)

    def _swap(self, out: Hashable, into: Hashable, resyncing: Resyncing) -> None:
        with resyncing():
            self.sums[out] = self.get()
            self.set(self.sums[into] or [None] * len(self.sums[out]))
            self.sums[into] = []

    def _unit(self, name: Hashable) -> float:
        """What a loss's sum is a multiple of: its first weight."""
        return self._losses.weights(name)[0] if self._losses.reduction == "mean" else 1.0

    def totals(self) -> dict[Hashable, float]:
        return {name: math.fsum(self._losses.weights(name)) for name in self.sums}

    def fold(self, totals: Mapping[Hashable, float] | None = None) -> None:
        """Divide each sum by its total, over all ranks if they are given, and add them up in `p.grad`."""
        totals = self.totals() if totals is None else totals
        for number, (name, sums) in enumerate(self.sums.items()):
            here = sums if number else self.gradients()
            scale_([s for s in here if s is not None], self._unit(name) / totals[name])
            if number and sums:
                self.set(_joined(self.get(), sums))
                self.sums[name] = []

    def expose(self, accepting: Resyncing) -> None:
        """Have an overflow of any loss in `p.grad`, where a GradScaler looks for it."""
        others = [s for sums in self.sums.values() for s in sums if s is not None]
        shown = [g for g in self.gradients() if not g.is_sparse]
        if others and shown:
            smallest = min(shown, key=Tensor.numel)
            with torch.no_grad(), accepting():
                smallest += torch.where(all_finite(others).to(smallest.device), 0.0, math.inf).to(smallest.dtype)

    # The sum, with those beside it.

    def everything(self) -> list[Tensor]:
        beside = [*self.sums.values(), *self._restored.values()]
        return super().everything() + [s for sums in beside for s in sums if s is not None]

    def join_restored(self, scale: Tensor | None = None) -> None:
        super().join_restored(scale)
        restored, self._restored = self._restored, {}
        for name, sums in restored.items():
            if scale is not None:
                scale_([s for s in sums if s is not None], scale)
            self.sums[name] = _joined(self.sums[name] or [None] * len(sums), sums)

    def clear(self, set_to_none: bool = True) -> None:
        super().clear(set_to_none)
        self.sums, self._restored = {}, {}

    def close(self) -> None:
        super().close()
        self.sums, self._restored = {}, {}

    # Files.

    def state_of_terms(self, scale: Tensor | None) -> list[dict[str, Any]]:
        """Each loss's name, weights and sum, copied; the first one's sum is `copies`."""
        return [
            {
                "name": name,
                "weights": self._losses.weights(name),
                "unit": self._unit(name),
                "gradients": {
                    index: s.clone() if scale is None or name in self._restored else s * scale.reciprocal().to(s)
                    for index, s in enumerate(self._restored.get(name, sums))
                    if s is not None
                },
            }
            for name, sums in self.sums.items()
        ]

    def load_terms(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.used = self.used or bool(state)
        for saved in state:
            found = saved["gradients"]
            self.sums[saved["name"]] = []
            if found:
                self._restored[saved["name"]] = [
                    found[index].detach().to(p.device, copy=True) if index in found else None
                    for index, p in enumerate(self.parameters())
                ]


@torch.no_grad()
def _joined(sums: Sequence[Tensor | None], more: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Both added up, in the first one's tensors where that can be."""
    pairs = zip(sums, more, strict=True)
    return [m if s is None else s if m is None else _added(s, m) for s, m in pairs]


def _added(one: Tensor, other: Tensor) -> Tensor:
    return one + other if one.is_sparse or other.is_sparse else one.add_(other.to(one.dtype))


# What is refused.


def not_by_name_error() -> ValueError:
    return ValueError(
        "backward({name: (loss, weight)}) has a weight for each loss: pass no other weight to backward() or batches(). "
        "It keeps a sum of gradients for each loss, so it can't be combined with sharded models, "
        'nonfinite="skip_micro_batch" or noise_scale=True. TrainStep can: its compute_loss may return the same dict.'
    )


def mixed_terms_error() -> WindowError:
    return WindowError(
        "Some losses of this window came as backward({name: (loss, weight)}), others as a single loss, which has no "
        "name. Use one form for all of them; discard() drops the window."
    )
