"""What a trainer's loss is a mean over: rows, labels that count, tokens of the completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.integrations.transformers.rows import as_inputs, row_count, with_labels
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.state import evaluated

logger = logging.getLogger("gradaccum")

IGNORED = -100
"""What transformers' losses ignore in labels."""

ENTRIES = 1 << 12
"""Entries of each parameter's gradient that are compared, about."""

TRAINERS_COUNT = "the Trainer's count"


class Denominator:
    """The weight of a trainer's batches.

    Candidates are what the Trainer itself counts for `num_items_in_batch`, the labels that are not ignored, the same
    shifted by one, rows, and the tokens of completions. Where they disagree about a batch, two of its rows tell which
    of them makes

        g(a + b)  =  (w(a) g(a) + w(b) g(b)) / (w(a) + w(b))

    true of the gradients in evaluation mode. What is wrong there is no candidate any more, nor is the Trainer's count
    once it is known to be one of the others: with one left, no batch is looked at.

    `loss(batch)` is the trainer's loss on some rows, without a trace in its logs; `given` what the user passed.
    """

    def __init__(self, trainer: Any, loss: Callable[[Any], Tensor], given: Callable[[Any], Any] | None = None) -> None:
        self._trainer, self._loss, self._given = trainer, loss, given
        self.exchanges = self.idle = False
        """Whether all ranks have to find the same; whether nothing can be tried out, as other ranks would wait."""
        self.left = ["weight"] if given is not None else [TRAINERS_COUNT, *_COUNTS]
        """The candidates that are left, the first of which is taken."""
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, batch: Any) -> Any:
        """What a batch weighs."""
        if self._given is not None:
            return self._given(as_inputs(batch))
        found = (self.items(batch) if name == TRAINERS_COUNT else _summed(_COUNTS[name](batch)) for name in self.left)
        return next((weight for weight in found if weight is not None), float(row_count(batch)))

    def items(self, batch: Any) -> Any:
        """The `num_items_in_batch` that the Trainer would count in this batch by itself; None where it counts none."""
        labels = with_labels(batch).get("labels")
        if labels is None:
            return None
        if self._last[0] is not labels:
            inputs = with_labels(batch) if "examples" in batch else as_inputs(batch)
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
            logger.debug(
                "The loss is not a mean over %s. Remaining candidates: %s.", ", ".join(wrong), ", ".join(self.left)
            )

    def _refuted(self, batch: Batch) -> list[str]:
        tree, weights = batch.tree[0], dict[str, Tensor]()
        for name in self.left:
            each = self._of_each_row(tree, batch) if name == TRAINERS_COUNT else _COUNTS[name](tree)
            if each is not None:
                weights[name] = each.cpu().double()
        known = len(weights)
        # Two rows that tell rows from labels may agree about labels and those shifted by one: the next two do not.
        while (pair := _telling_pair(list(weights.values()))) is not None:
            wrong = self._refuted_by(pair, weights, batch)
            if not wrong or len(wrong) == len(weights):
                break
            weights = {name: weight for name, weight in weights.items() if name not in wrong}
        if len(weights) == known:
            return []
        own = weights.get(TRAINERS_COUNT)
        if own is not None and len(weights) == 2 and all(torch.equal(weight, own) for weight in weights.values()):
            del weights[TRAINERS_COUNT]
        return [name for name in self.left if name not in weights]

    def _refuted_by(self, pair: tuple[int, int], weights: Mapping[str, Tensor], batch: Batch) -> list[str]:
        rows = [batch.take(torch.tensor(some)) for some in ([pair[0]], [pair[1]], list(pair))]
        try:
            with evaluated(list(self._trainer.model.modules()), self._trainer.args.device):
                *parts, whole = map(self._gradient, rows)
        except Exception as error:
            logger.debug("The loss could not be evaluated on two rows: %s", error)
            return []
        errors = {name: _residual(whole, parts, weight[list(pair)]) for name, weight in weights.items()}
        best, size = min(errors.values()), float(whole.norm())
        # Far from the best, and from what rounding makes.
        return [name for name, error in errors.items() if not error <= 4 * best + 1e-5 * size]

    def _of_each_row(self, tree: Any, batch: Batch) -> Tensor | None:
        """Each row's part in what the Trainer counts."""
        total = self.items(tree)
        if total is None:
            return None
        for count in (_labels, _shifted):
            each = count(tree)
            if each is not None and float(each.sum()) == float(total):
                return each
        rows = (batch.take(slice(row, row + 1)).tree[0] for row in range(batch.rows))
        return torch.tensor([float(self.items(row)) for row in rows])

    def _gradient(self, rows: Batch) -> Tensor:
        """Some entries of each parameter's, from all over it; zeros where there is none."""
        parameters = [p for p in self._trainer.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(self._loss(rows.tree[0]), parameters, allow_unused=True)
        given = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
        return torch.cat([g.detach().reshape(-1)[:: max(1, g.numel() // ENTRIES)].float() for g in given])


# Each row's weight, by what the loss may be a mean over; None where a batch has no such thing.


def _labels(batch: Any) -> Tensor | None:
    labels = with_labels(batch).get("labels")
    return _per_row(labels != IGNORED) if isinstance(labels, Tensor) and labels.dim() > 0 else None


def _shifted(batch: Any) -> Tensor | None:
    inputs = with_labels(batch)
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return None
    return _per_row(inputs.get("shift_labels", labels[..., 1:]) != IGNORED)


def _completions(batch: Any) -> Tensor | None:
    inputs = with_labels(batch)  # of reinforcement learning: preferences are means over pairs
    return _per_row(inputs["completion_mask"]) if {"completion_mask", "advantages"} <= inputs.keys() else None


def _summed(each: Tensor | None) -> Tensor | None:
    return None if each is None else each.sum()


def _per_row(mask: Tensor) -> Tensor:
    return mask.flatten(1).sum(1) if mask.dim() > 1 else mask.long()


_COUNTS: dict[str, Callable[[Any], Tensor | None]] = {
    "labels": _labels,
    "labels shifted by one": _shifted,
    "rows": lambda batch: torch.ones(row_count(batch)),
    "tokens of the completions": _completions,
}


def _telling_pair(weights: Sequence[Tensor]) -> tuple[int, int] | None:
    """Two rows about which the weights disagree most; None where all weights are proportional."""
    most, found = 1e-9, None
    for index, weight in enumerate(weights):
        for other in weights[index + 1 :]:
            ratio = (weight / other).nan_to_num(nan=-1.0, posinf=-1.0)
            usable = (ratio > 0).nonzero().flatten()
            if len(usable) < 2:
                continue
            low, high = (int(usable[place(ratio[usable])]) for place in (torch.argmin, torch.argmax))
            spread = 1.0 - float(ratio[low] / ratio[high])
            if spread > most:
                most, found = spread, (low, high)
    return found


def _residual(whole: Tensor, parts: Sequence[Tensor], weights: Tensor) -> float:
    total = float(weights.sum())
    if total <= 0:
        return float("inf")
    fit = sum((float(w) / total * part for w, part in zip(weights, parts) if w > 0), torch.zeros_like(whole))
    error = float((whole - fit).norm())
    return error if error == error else float("inf")
