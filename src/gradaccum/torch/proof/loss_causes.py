"""What a loss divides by, found out by fitting: from the gradients of a batch and of its two parts.

Let `L` be the user's loss as it is, and `A` and `B` the parts of a batch. One of these holds for most losses:

    a mean        L(A + B)  =  t L(A) + (1 - t) L(B)        t is the share of what A is a mean over
    a sum         L(A + B)  =  L(A) + L(B)
    a sum and a   L(A + B)  =  L(A) + L(B) - R              R is the same for all parts: it doesn't depend on the rows
    regulariser
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause
from gradaccum.on_torch.adapter.probes import Outputs
from gradaccum.on_torch.batch import leaves
from gradaccum.torch.proof.trial import Trial

__all__ = ["loss_cause"]

_FITS = 1e-6
"""Largest relative residual of a fit, in float64."""


@dataclass(frozen=True)
class _Split:
    """The loss's value and gradients for the batch and for both of its parts, each block scaled to 1."""

    rows: tuple[Tensor, Tensor]
    whole: Tensor
    parts: tuple[Tensor, Tensor]
    weights: tuple[float | None, float | None]
    """What `compute_loss` returned with the parts' losses."""

    @classmethod
    def of(cls, trial: Trial, rows: tuple[Tensor, Tensor], outputs: Outputs | None) -> _Split:
        whole, _ = trial.raw(None, outputs)
        scales = [block.abs().max().item() or 1.0 for block in whole]

        def vector(blocks: list[Tensor]) -> Tensor:
            return torch.cat([(block / scale).double().cpu() for block, scale in zip(blocks, scales)])

        (a, weight_a), (b, weight_b) = (trial.raw(part, outputs) for part in rows)
        return cls(rows, vector(whole), (vector(a), vector(b)), (weight_a, weight_b))

    def share(self) -> float | None:
        """t of the mean's formula, where that holds."""
        a, b = self.parts
        direction = a - b
        square = float(direction @ direction)
        if square < 1e-16:
            return None
        t = float((self.whole - b) @ direction) / square
        return t if self._fits(t * a + (1 - t) * b) else None

    def excess(self) -> Tensor:
        """R of the sum's formula."""
        return self.parts[0] + self.parts[1] - self.whole

    def _fits(self, fit: Tensor) -> bool:
        return bool((self.whole - fit).abs().max() < _FITS)


def loss_cause(trial: Trial, splits: Sequence[tuple[Tensor, Tensor]], outputs: Outputs | None) -> Cause | None:
    """Why these losses don't add up to the large batch's, or None where nothing can be said.

    Args:
        trial: The copy to try it on.
        splits: At least two ways to cut the rows in two.
        outputs: The model's outputs for the large batch, to judge the loss alone; None judges model and loss together.
    """
    found = [_Split.of(trial, rows, outputs) for rows in splits]
    if outputs is not None and not outputs.complete:
        return None
    if any(not split.whole.isfinite().all() or not torch.cat(split.parts).isfinite().all() for split in found):
        return None
    shares = [split.share() for split in found]
    if all(share is not None and -_FITS < share < 1 + _FITS for share in shares):
        return _wrong_weight(trial, found, [share for share in shares if share is not None])
    excess = [split.excess() for split in found]
    if all(e.abs().max() < _FITS for e in excess):
        return _sum(trial)
    spread = max(float((e - excess[0]).abs().max()) for e in excess)
    if spread < _FITS:
        return Cause(
            "regulariser",
            "loss",
            "The loss has a term that doesn't depend on the rows (a regulariser, such as a sum over the parameters) "
            "beside a sum over them, so it is counted once per micro-batch: K times in a window of K. Return the term "
            "times the share of the rows, as in `sum + penalty * len(x) / total_rows`; or return a mean over rows plus "
            "the term, which accumulates exactly.",
        )
    return Cause(
        "loss",
        "loss",
        "The loss is not additive over rows: no weights make the parts add up to the large batch's. It looks across "
        "the batch (contrastive, Dice, a batch mean or variance), or it is not linear in its mean. Use "
        "gradaccum.torch.chunked around the model, which gives the large batch's gradient for any loss. Where only a "
        "few rows belong together, as pairs do, groups= keeps them together.",
    )


def _sum(trial: Trial) -> Cause:
    if trial.original.reduction == "sum":
        return Cause(
            "weight",
            "loss",
            "The loss is a sum over its rows, but its weight is not: the weights of the parts don't add up to the "
            "large batch's. Let `weight` count something that adds up, such as rows or tokens.",
        )
    return Cause(
        "reduction",
        "loss",
        "The loss is a sum over its rows, or is divided by a number that doesn't depend on the micro-batch, and was "
        'taken to be a mean. Pass reduction="sum".',
    )


def _wrong_weight(trial: Trial, splits: list[_Split], shares: list[float]) -> Cause | None:
    original = trial.original
    if original.reduction == "mean" and all(
        _close(share, _share([_declared(trial, split, part) for part in (0, 1)]))
        for split, share in zip(splits, shares)
    ):
        return None  # weighed right: the loss is not what differs
    names = _argument_names(original.compute_loss, trial.batch.tree)
    for candidate in _candidates(trial):
        counted = [[candidate.count(trial, rows) for rows in split.rows] for split in splits]
        if all(min(c) >= 0 and sum(c) > 0 and _close(s, _share(c)) for c, s in zip(counted, shares)):
            break
    else:
        sizes = [len(rows) for rows in splits[0].rows]
        return Cause(
            "weight",
            "loss",
            f"The loss is a mean, but not over {_was(trial, splits[0])}: micro-batches of {sizes[0]} and {sizes[1]} "
            f"rows would have to weigh {shares[0]:.4g} to {1 - shares[0]:.4g}. Tried rows, targets that are not "
            "ignored, masks and class weights; none of them is it. Return (loss, weight) from `compute_loss`, with "
            "what the loss divides by.",
        )
    keywords = [] if candidate.is_rows else [f"weight=lambda {', '.join(names)}: {candidate.code(names)}"]
    if original.reduction == "sum":
        keywords.insert(0, 'reduction="mean"')
    if keywords:
        advice = f"Pass {', '.join(keywords)}"
    else:
        advice = "Leave `weight` out" if original.weight is not None else "Return the loss alone, or its rows with it"
    return Cause(
        "weight",
        "loss",
        f"The loss is a mean over {candidate.name}, but its micro-batches were weighed by {_was(trial, splits[0])}. "
        f"{advice}: that makes them exact.",
    )


def _was(trial: Trial, split: _Split) -> str:
    if split.weights[0] is not None:
        return "what `compute_loss` returns with the loss"
    if trial.original.weight is not None:
        return "what `weight` returns"
    return "nothing, being taken for sums" if trial.original.reduction == "sum" else "rows"


def _declared(trial: Trial, split: _Split, part: int) -> float:
    own = split.weights[part]
    if own is not None:
        return own
    weight = trial.original.total(trial.batch.take(split.rows[part]))
    if isinstance(weight, dict):
        weight = weight.get(trial.term, 0.0)
    return 0.0 if weight is None else float(weight)


def _share(weights: Sequence[float]) -> float:
    return weights[0] / sum(weights) if sum(weights) else 0.0


def _close(a: float, b: float) -> bool:
    return abs(a - b) < 1e-5


# What a mean may be over.


@dataclass(frozen=True)
class _Candidate:
    name: str
    expression: str
    """With `{}` for the tensor."""
    path: str
    measure: Callable[[Tensor], float]
    is_rows: bool = False

    def count(self, trial: Trial, rows: Tensor) -> float:
        if self.is_rows:
            return float(len(rows))
        taken = trial.batch.take(rows).tree
        return next(self.measure(leaf) for path, leaf in leaves(taken) if path == self.path)

    def code(self, names: Sequence[str]) -> str:
        """The expression, with the batch's own names: `[1]['mask']` becomes `y['mask']`."""
        index, _, rest = self.path.removeprefix("[").partition("]")
        return self.expression.format(names[int(index)] + rest) if index.isdigit() else "..."


def _candidates(trial: Trial) -> Iterator[_Candidate]:
    yield _Candidate("rows", "len(x)", "", lambda leaf: 0.0, is_rows=True)
    tensors = [(path, leaf) for path, leaf in leaves(trial.batch.tree) if isinstance(leaf, Tensor) and leaf.dim()]
    ignored = sorted({-100, -1, 0, *_ignored(trial.original.loss_fn)})
    for path, leaf in tensors:
        if leaf.is_floating_point() or leaf.is_complex():
            continue
        is_mask = leaf.dtype == torch.bool or set(leaf.unique().tolist()) <= {0, 1}
        if is_mask:
            yield _Candidate(f"the entries of batch{path} that are set", "{}.sum()", path, lambda t: float(t.sum()))
        for index in ignored:
            yield _counting(path, index, "")
            if leaf.dim() > 1:
                yield _counting(path, index, "[:, 1:]")
    for path, leaf in tensors:
        if not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool:
            for name, weights in _class_weights(trial):
                for index in (-100, *_ignored(trial.original.loss_fn)):
                    if ((leaf == index) | ((leaf >= 0) & (leaf < len(weights)))).all():
                        yield _weighing(path, index, name, weights)
    for path, leaf in tensors:
        if leaf.is_floating_point() and (leaf >= 0).all():
            yield _Candidate(f"the weights in batch{path}", "{}.sum()", path, lambda t: float(t.sum()))
            yield _Candidate(
                f"the entries of batch{path} that are not 0", "({} != 0).sum()", path, lambda t: float((t != 0).sum())
            )


def _counting(path: str, index: int, part: str) -> _Candidate:
    def measure(tensor: Tensor) -> float:
        return float(((tensor[:, 1:] if part else tensor) != index).sum())

    shifted = ", from the second position on," if part else ""
    return _Candidate(
        f"the entries of batch{path}{shifted} that are not {index}", f"({{}}{part} != {index}).sum()", path, measure
    )


def _weighing(path: str, index: int, name: str, weights: Tensor) -> _Candidate:
    def measure(tensor: Tensor) -> float:
        return float(weights[tensor[tensor != index].long()].sum())

    return _Candidate(
        f"the sum of the class weights `{name}` of batch{path}", f"{name}[{{0}}[{{0}} != {index}]].sum()", path, measure
    )


def _ignored(loss_fn: Any) -> list[int]:
    found = getattr(loss_fn, "ignore_index", None)
    if isinstance(loss_fn, functools.partial):
        found = loss_fn.keywords.get("ignore_index")
    return [found] if isinstance(found, int) else []


def _class_weights(trial: Trial) -> list[tuple[str, Tensor]]:
    """Vectors of weights that the loss refers to, with their names."""
    found: dict[str, Any] = {}
    for function in (trial.original.loss_fn, trial.original.compute_loss):
        while isinstance(function, functools.partial):
            found.update(function.keywords)
            function = function.func
        if isinstance(function, nn.Module):
            found.update({name: buffer for name, buffer in function.named_buffers()})
            found.update({name: value for name, value in vars(function).items() if isinstance(value, Tensor)})
        elif inspect.isfunction(function):
            variables = inspect.getclosurevars(function)
            found.update(variables.globals)
            found.update(variables.nonlocals)
            for name, value in [*variables.globals.items(), *variables.nonlocals.items()]:
                if isinstance(value, nn.Module):
                    found.update({f"{name}.{inner}": buffer for inner, buffer in value.named_buffers()})
    return [
        (name, value.detach().double().cpu())
        for name, value in found.items()
        if isinstance(value, Tensor) and value.dim() == 1 and value.is_floating_point() and (value >= 0).all()
    ]


def _argument_names(compute_loss: Any, batch: tuple[Any, ...]) -> list[str]:
    """What the user calls the batch's parts."""
    default = ["x", "y"] if len(batch) == 2 else ["batch"] if len(batch) == 1 else [f"x{i}" for i in range(len(batch))]
    if not inspect.isfunction(compute_loss):
        return default
    names = [
        name
        for name, p in inspect.signature(compute_loss).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ][1:]
    return names[: len(batch)] if len(names) >= len(batch) else default
