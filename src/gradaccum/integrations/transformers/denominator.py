"""What a trainer's loss is a mean over: rows, or the labels that count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.buffers import evaluated

__all__ = ["Denominator"]

logger = logging.getLogger("gradaccum")

IGNORED = -100
"""What transformers' losses ignore in labels."""

ENTRIES = 1 << 12
"""Entries of each parameter's gradient that are compared, about."""

Count = Callable[[Any], Any]
"""`count(batch)`: what a batch weighs."""


class Denominator:
    """The weight of a trainer's batches.

    Candidates are what the Trainer itself counts for `num_items_in_batch`, the labels that are not ignored, the same
    shifted by one, and rows. Where they disagree about a batch, two of its rows tell which of them makes

        g(a + b)  =  (w(a) g(a) + w(b) g(b)) / (w(a) + w(b))

    true of the gradients in evaluation mode. What is wrong there is no candidate any more.

    Args:
        trainer: The trainer.
        loss: `loss(batch)`: the trainer's loss on some rows, without a trace in its logs.
        given: What the user says it is a mean over, or None.
    """

    def __init__(self, trainer: Any, loss: Callable[[Any], Tensor], given: Count | None = None) -> None:
        self._trainer, self._loss = trainer, loss
        self.exchanges = False
        """Whether all ranks have to find the same."""
        self.idle = False
        """Whether nothing can be tried out: other ranks would wait."""
        self._counts: dict[str, Count] = {"the Trainer's count": self.items}
        self._counts |= {"labels": _labels, "labels shifted by one": _shifted, "rows": _rows}
        self.left = list(self._counts)
        """The candidates that are left, the first of which is taken."""
        if given is not None:
            self._counts, self.left = {"weight": given}, ["weight"]
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, batch: Any) -> Any:
        """What a batch weighs."""
        for name in self.left:
            weight = self._counts[name](batch)
            if weight is not None:
                return weight
        return _rows(batch)

    def items(self, batch: Any) -> Any:
        """The `num_items_in_batch` that the Trainer would count in this batch by itself; None where it counts none."""
        inputs = batch.get("examples", batch)
        labels = inputs.get("labels")
        if labels is None:
            return None
        if self._last[0] is not labels:
            self._last = labels, self._trainer._get_num_items_in_batch([inputs], self._trainer.args.device)
        return self._last[1]

    def look_at(self, tree: Any) -> None:
        """Rule out what this batch shows to be wrong. All ranks take part."""
        if len(self.left) < 2 or self.idle:
            return
        batch = Batch((tree,))
        wrong = self._refuted(batch) if batch.rows > 1 else []
        if self.exchanges:
            flags = torch.tensor([float(name in wrong) for name in self.left], device=self._trainer.args.device)
            found = self._trainer.accelerator.gather(flags[None]).amax(0).tolist()
            wrong = [name for name, flag in zip(self.left, found) if flag]
        if wrong and len(wrong) < len(self.left):
            self.left = [name for name in self.left if name not in wrong]
            logger.debug("The loss is not a mean over %s. Left: %s.", ", ".join(wrong), ", ".join(self.left))

    def _refuted(self, batch: Batch) -> list[str]:
        weights = {name: self._of_each_row(name, batch) for name in self.left}
        known = {name: weight for name, weight in weights.items() if weight is not None}
        refuted: list[str] = []
        # Two rows that tell rows from labels may agree about labels and those shifted by one: the next two do not.
        while (pair := _telling_pair(list(known.values()))) is not None:
            wrong = self._refuted_by(pair, known, batch)
            if not wrong or len(wrong) == len(known):
                break
            refuted += wrong
            known = {name: weight for name, weight in known.items() if name not in wrong}
        return refuted

    def _refuted_by(self, pair: tuple[int, int], weights: dict[str, Tensor], batch: Batch) -> list[str]:
        one, other, both = (batch.take(torch.tensor(rows)) for rows in ([pair[0]], [pair[1]], list(pair)))
        try:
            with evaluated(list(self._trainer.model.modules()), self._trainer.args.device):
                parts = [self._gradient(part) for part in (one, other)]
                whole = self._gradient(both)
        except Exception as error:
            logger.debug("The loss could not be evaluated on two rows: %s", error)
            return []
        errors = {name: _residual(whole, parts, weight[list(pair)]) for name, weight in weights.items()}
        best, size = min(errors.values()), float(whole.norm())
        # Far from the best, and from what rounding makes.
        return [name for name, error in errors.items() if not error <= 4 * best + 1e-5 * size]

    def _of_each_row(self, name: str, batch: Batch) -> Tensor | None:
        """Each row's weight by this candidate, on the host; None where it says nothing."""
        if name == "rows":
            return torch.ones(batch.rows, dtype=torch.float64)
        inputs = batch.tree[0].get("examples", batch.tree[0])
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() == 0:
            return None
        total = self._counts[name](batch.tree[0])
        if total is None:
            return None
        for counted in (labels, labels[..., 1:]) if labels.dim() > 1 else (labels,):
            each = (counted != IGNORED).flatten(1).sum(1) if counted.dim() > 1 else counted != IGNORED
            each = each.cpu().double()
            if float(each.sum()) == float(total):
                return each
        rows = (batch.take(slice(row, row + 1)).tree[0] for row in range(batch.rows))
        return torch.tensor([float(self._counts[name](row)) for row in rows], dtype=torch.float64)

    def _gradient(self, rows: Batch) -> Tensor:
        parameters = [p for p in self._trainer.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(self._loss(rows.tree[0]), parameters, allow_unused=True)
        return torch.cat([_sample(p if g is None else g, g is None) for p, g in zip(parameters, found)])


def _sample(tensor: Tensor, unused: bool) -> Tensor:
    """Some entries of a gradient, from all over it; zeros where there is none."""
    some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // ENTRIES)].float()
    return torch.zeros_like(some) if unused else some


def _labels(batch: Any) -> Any:
    labels = batch.get("examples", batch).get("labels")
    return (labels != IGNORED).sum() if isinstance(labels, Tensor) else None


def _shifted(batch: Any) -> Any:
    inputs = batch.get("examples", batch)
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return None
    return (inputs.get("shift_labels", labels[..., 1:]) != IGNORED).sum()


def _rows(batch: Any) -> float:
    return float(Batch((batch,)).rows)


def _telling_pair(weights: Sequence[Tensor]) -> tuple[int, int] | None:
    """Two rows about which the weights disagree most; None where all weights are proportional."""
    best: tuple[float, tuple[int, int]] = (1e-9, (0, 0))
    for index, weight in enumerate(weights):
        for other in weights[index + 1 :]:
            ratio = (weight / other).nan_to_num(nan=-1.0, posinf=-1.0)
            usable = (ratio > 0).nonzero().flatten()
            if len(usable) < 2:
                continue
            low, high = (int(usable[f(ratio[usable])]) for f in (torch.argmin, torch.argmax))
            spread = 1.0 - float(ratio[low] / ratio[high])
            if spread > best[0]:
                best = spread, (low, high)
    return best[1] if best[0] > 1e-9 else None


def _residual(whole: Tensor, parts: Sequence[Tensor], weights: Tensor) -> float:
    total = float(weights.sum())
    if total <= 0:
        return float("inf")
    fit = sum((float(w) / total * part for w, part in zip(weights, parts) if w > 0), torch.zeros_like(whole))
    error = float((whole - fit).norm())
    return error if error == error else float("inf")
