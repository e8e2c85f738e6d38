"""Adds up the losses of a window's micro-batches, by name: gradients and means. A single loss has the name None.

    large batch's loss  =  sum_j  sum_i w_ij l_ij / W_j       with  W_j = sum_i w_ij,  over names j and micro-batches i

What loss j adds to its sum of gradients is `w_ij / u_j` times its gradient, or `1 / u_j` times, where losses are sums.
Where `W_j` is known before the first backward pass, the unit `u_j` is `W_j`: the gradients of all losses add up in one
place, and are complete (`TrainStep`; `BatchLosses` finds the totals). Elsewhere the unit is the first weight, and the
sum is divided by `W_j / u_j` when the window closes; until then each of several losses has a sum of its own (a wrapped
optimizer's window; `NamedBuffer` holds them).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.window import Reduction
from gradaccum.on_torch.foreach import all_finite, scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer, Sums, joined
from gradaccum.torch.loss.named import Entry, Terms, Totals, Weight, ratio, weighted_sum

Resyncing = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which the sum may be changed."""


class LossSum:
    """What one loss has added up to."""

    def __init__(self, unit: Weight) -> None:
        self.unit = unit
        self.losses: list[Entry] = []
        self.weights: dict[int, Weight] = {}  # of its micro-batches


class LossAccumulator:
    """The losses of one window, by name. They stay until the next one begins; nothing is computed until somebody asks.

    `totals`: what each divides by, where that is known. `buffer`: what holds the gradients, where it isn't.
    """

    totals: Totals | None = None
    buffer: NamedBuffer | None = None
    over = weighed = False
    """Whether the window has closed; whether the user has said what a loss weighs."""

    def __init__(self, reduction: Reduction, buffer: NamedBuffer | None = None) -> None:
        self.adds, self.buffer = reduction == "sum", buffer
        self.restart()

    def restart(self) -> None:
        self.sums: dict[Hashable, LossSum] = {}
        self.dropped: set[int] = set()  # micro-batches that don't count
        self.over = self.weighed = False

    def unit(self, name: Hashable, weight: Weight) -> Weight:
        if name in self.sums:
            return self.sums[name].unit
        return self.totals[name] if self.totals is not None else 1.0 if self.adds else weight

    def factor(self, name: Hashable, weight: Weight) -> Weight:
        """What the gradient of a loss is multiplied by."""
        return ratio(1.0 if self.adds else weight, self.unit(name, weight))

    def add(self, micro_batch: int, loss: Tensor, weight: Weight, given: bool = True, name: Hashable = None) -> None:
        if self.over:
            self.restart()
        if name not in self.sums:
            self.sums[name] = LossSum(self.unit(name, weight))
        one = self.sums[name]
        one.losses.append((loss.detach(), 1.0 if self.adds else weight, micro_batch))
        one.weights[micro_batch] = weight
        self.weighed = self.weighed or given

    def means(self) -> dict[Hashable, Tensor]:
        """The window's mean of the losses of each name, of no dimensions."""
        found, plain = {}, self.adds and not self.weighed
        for name, one in self.sums.items():
            if losses := [entry for entry in one.losses if entry[2] not in self.dropped]:
                found[name] = weighted_sum(losses, 1.0 if plain else self.weight(name))
        return found

    def weight(self, name: Hashable) -> float:
        """What the micro-batches' losses of this name weigh."""
        return math.fsum(float(w) for i, w in self.sums[name].weights.items() if i not in self.dropped)

    def mean(self) -> Tensor | None:
        means = list(self.means().values())
        return torch.stack(means).sum() if len(means) > 1 else means[0] if means else None

    def unscale(self, micro_batch: int, scale: Tensor | None, live: Tensor | None) -> None:
        """Losses of this micro-batch came multiplied by a GradScaler's scale: the last one known after `unscale_`."""
        scale = live if scale is None else scale
        for one in self.sums.values():
            if scale is None:
                one.losses.clear()
            else:
                one.losses = [((x / scale).reshape(()) if i == micro_batch else x, n, i) for x, n, i in one.losses]

    # Several losses whose totals are known when the window closes.

    @property
    def by_name(self) -> bool:
        """Whether this window's losses came by name."""
        return self.buffer is not None and bool(self.buffer.sums)

    def backward_each(
        self, micro_batch: int, terms: Terms, resyncing: Resyncing, run: Callable[..., None], **how: Any
    ) -> None:
        """Add a micro-batch's losses, and the gradient of each to its own sum; detached ones have none."""
        assert self.buffer is not None
        keeps, later = how.pop("retain_graph"), [name for name, term in terms.items() if term.loss.requires_grad]
        for name, (loss, weight) in terms.items():
            self.add(micro_batch, loss, weight, True, name)
            with self.buffer.at(name, resyncing):
                if loss.requires_grad:
                    run(loss, self.factor(name, weight), retain_graph=keeps if name == later[-1] else True, **how)

    def weights(self) -> dict[Hashable, float]:
        """What each loss weighs by now."""
        return {name: self.weight(name) for name in (() if self.buffer is None else self.buffer.sums)}

    def fold(self, totals: Mapping[Hashable, float] | None = None) -> None:
        """Divide each sum by its total, over all ranks if they are given, and add them up in `p.grad`."""
        assert self.buffer is not None
        totals = self.weights() if totals is None else totals
        self.buffer.fold({name: float(self.sums[name].unit) / totals[name] for name in self.buffer.sums})

    # Files.

    def state_dict(self) -> dict[str, Any]:
        losses = [
            [i, loss.clone(), one.weights[i], *([] if name is None else [name])]
            for name, one in self.sums.items()
            for loss, _, i in one.losses
        ]
        return {"losses": losses, "losses_weighed": self.weighed}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.restart()
        for index, loss, weight, *name in state["losses"]:
            loss = loss.to(device, copy=True).reshape(())
            self.add(index, loss, weight, state["losses_weighed"], name[0] if name else None)


class NamedBuffer(GradientBuffer):
    """The sum in `p.grad`; with several losses that of the first one, and beside it a sum for each other one."""

    def __init__(self, parameters: Callable[[], list[Tensor]], dtype: torch.dtype | None = None) -> None:
        self.used = False  # whether losses have ever come by name
        self.sums: dict[Hashable, Sums] = {}
        """Of each loss, for each parameter; empty where it is in `p.grad`, or nothing has arrived."""
        self._restored: dict[Hashable, Sums] = {}
        """A checkpoint's sums, until the next micro-batch is in."""
        super().__init__(parameters, dtype)

    def prepare(self) -> None:
        super().prepare()
        for held in (self.restored, *self.sums.values(), *self._restored.values()):
            if held:  # the parameters that were added come last
                held += [None] * (len(self.parameters()) - len(held))

    @contextlib.contextmanager
    def at(self, name: Hashable, resyncing: Resyncing) -> Iterator[None]:
        """Meanwhile gradients join the sum of this loss."""
        self.sums.setdefault(name, [])
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

    def fold(self, factors: Mapping[Hashable, float]) -> None:
        """Multiply each sum by its factor, and add them up in `p.grad`."""
        for number, (name, sums) in enumerate(self.sums.items()):
            scale_([s for s in (sums if number else self.gradients()) if s is not None], factors[name])
            if number and sums:
                self.set(joined(self.get(), sums))
                self.sums[name] = []

    def expose(self, accepting: Resyncing) -> None:
        """Have an overflow of any loss in `p.grad`, where a GradScaler looks for it."""
        others = [s for sums in self.sums.values() for s in sums if s is not None]
        shown = [g for g in self.gradients() if not g.is_sparse] if others else []
        if shown:
            smallest = min(shown, key=Tensor.numel)
            with torch.no_grad(), accepting():
                smallest += torch.where(all_finite(others).to(smallest.device), 0.0, math.inf).to(smallest.dtype)

    def everything(self) -> list[Tensor]:
        beside = [*self.sums.values(), *self._restored.values()]
        return super().everything() + [s for sums in beside for s in sums if s is not None]

    def join_restored(self, scale: Tensor | None = None) -> None:
        super().join_restored(scale)
        restored, self._restored = self._restored, {}
        for name, sums in restored.items():
            if scale is not None:
                scale_([s for s in sums if s is not None], scale)
            self.sums[name] = joined(self.sums[name] or [None] * len(sums), sums)

    def clear(self, set_to_none: bool = True) -> None:
        super().clear(set_to_none)
        self.sums, self._restored = {}, {}

    def close(self) -> None:
        super().close()
        self.sums, self._restored = {}, {}

    def copies_by_name(self, scale: Tensor | None) -> list[dict[str, Any]]:
        """`copies` of each loss's sum; of the first one, which is in `p.grad`, nothing."""
        found = []
        for name, sums in self.sums.items():
            restored = self._restored.get(name)
            factor = None if scale is None or restored is not None else scale.reciprocal()
            held = enumerate(sums if restored is None else restored)
            copies = {i: s.clone() if factor is None else s * factor.to(s) for i, s in held if s is not None}
            found.append({"name": name, "gradients": copies})
        return found

    def restore_by_name(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.used = self.used or bool(state)
        for saved in state:
            found = saved["gradients"]
            self.sums[saved["name"]] = []
            if found:
                self._restored[saved["name"]] = [
                    found[index].detach().to(p.device, copy=True) if index in found else None
                    for index, p in enumerate(self.parameters())
                ]
