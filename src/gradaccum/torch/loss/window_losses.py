"""The losses of a wrapped optimizer's window, and a sum of gradients for each of several that come by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.window import Reduction
from gradaccum.on_torch.foreach import all_finite, scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.torch.loss.named import Terms, weighted_sum

__all__ = ["NamedSums", "WindowLosses"]

Resyncing = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which the sum may be changed."""


class WindowLosses:
    """The losses of a window's micro-batches, by name, and what each weighs. They stay until the next window begins.

    Single losses have the name None. Nothing is computed until somebody asks.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.restart()

    def restart(self) -> None:
        self.entries: list[tuple[int, Tensor, float, Hashable]] = []
        """Number of the micro-batch, loss, weight, name."""
        self.weighed = False
        self.dropped: set[int] = set()

    def add(self, micro_batch: int, loss: Tensor, weight: float, given: bool, name: Hashable = None) -> None:
        self.entries.append((micro_batch, loss.detach(), weight, name))
        self.weighed = self.weighed or given

    def unscale(self, micro_batch: int, scale: Tensor) -> None:
        """Losses of this micro-batch came multiplied by a GradScaler's scale."""
        self.entries = [(i, loss / scale if i == micro_batch else loss, w, n) for i, loss, w, n in self.entries]

    def names(self, micro_batch: int) -> set[Hashable]:
        return {name for index, _, _, name in self.entries if index == micro_batch}

    def weights(self, name: Hashable) -> list[float]:
        """What this loss has weighed in each of its micro-batches."""
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
        self.used = False
        """Whether losses have ever come by name."""
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
                with resyncing():
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
        """Backward passes add to this loss's sum."""
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
