"""The search for causes: which module, loss, weight or regulariser makes micro-batches differ from the large batch.

It is the same for every framework. Arrays are used by their operators alone (`-`, `*`, `abs`, `.sum()`, `.conj()`), and
rows are whatever the adapter takes rows by.

What a loss divides by is found out by fitting. Let `L` be the user's loss as it is, and `A` and `B` the parts of a
batch. One of these holds for most losses:

    a mean        L(A + B)  =  t L(A) + (1 - t) L(B)        t is the share of what A is a mean over
    a sum         L(A + B)  =  L(A) + L(B)
    a sum and a   L(A + B)  =  L(A) + L(B) - R              R is the same for all parts: it doesn't depend on the rows
    regulariser
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.proof import Runner, differences_between
from gradaccum.core.ways import Way

Array = Any
Rows = Any
Key = TypeVar("Key", bound=Hashable)

FITS = 1e-6
"""Largest relative residual of a fit, in float64."""


# Modules.


def innermost(
    calls: Iterable[Key],
    inputs_agree: Callable[[Key], bool],
    outputs_differ: Callable[[Key], bool],
    is_inside: Callable[[Key, Key], bool],
) -> list[Key]:
    """The innermost of the called modules that are given the same and return something else: there, rows mix.

    Example:
        >>> innermost(["", "a", "a.norm"], lambda key: True, lambda key: True, lambda a, b: a != b and a.startswith(b))
        ['a.norm']
    """
    found = [key for key in calls if inputs_agree(key) and outputs_differ(key)]
    return [key for key in found if not any(is_inside(inner, key) for inner in found)]


def mixing_cause(where: str, kind: str, *, batch_norm: str = "", advice: str) -> Cause:
    """A module of this class in which a row's output depends on other rows, and what to do, if it is a BatchNorm."""
    if batch_norm:
        message = f"'{where}' is a {kind}: it normalises each micro-batch by itself. {batch_norm}"
        return Cause("batch_norm", where, message)
    of_kind = f" ({kind})" if kind else ""
    return Cause(
        "mixes_rows",
        where,
        f"'{where}'{of_kind} mixes rows: its output for a row depends on the other rows of the micro-batch (a batch "
        f"statistic, detached or not, a ranking or a capacity over the batch). {advice}",
    )


def moving_cause(where: str, kind: str, names: Sequence[str], *, decides: bool) -> Cause:
    """A module at `where` whose state, of these names, moves with every forward pass; `decides`: gradients, too."""
    of_kind = f" ({kind})" if kind else ""
    advice = (
        "Its output depends on them, so later micro-batches see other values than the large batch. Move them once per "
        "update (one pass in train mode after the optimizer's step, the rest in eval mode), or remove them."
        if decides
        else "Where that matters, move them once per update, after the optimizer's step."
    )
    return Cause(
        "buffer",
        where,
        f"'{where}'{of_kind} moves its buffers ({', '.join(names)}) in every forward pass: once per micro-batch, not "
        f"once per update. {advice}",
    )


def nondeterminism_cause(unrepeated: Sequence[Difference], look_for: str) -> Cause:
    """The large batch differs from itself, so nothing can be said of its micro-batches."""
    error = max(difference.error for difference in unrepeated)
    return Cause(
        "nondeterminism",
        "loss",
        f"The same batch gives another gradient each time, by a relative error of {error:.2g}: look for {look_for}.",
    )


# Inputs.


def shared_input(candidates: Iterable[tuple[Key, Callable[[], Runner]]], ways: Sequence[Way], tolerance: float) -> Any:
    """The first way to treat a tensor of the batch, as whole in every micro-batch say, with which nothing differs.

    Each comes with what makes the runner that treats it so. Where one micro-batch alone is as good as all of them,
    nothing hangs on the other tensors, and it says nothing.
    """
    order, sizes = ways[0]
    for candidate, make in candidates:
        try:
            runner = make()
            large, *parts, alone = (runner.run(way) for way in (None, *ways[:2], (order[: sizes[0]], sizes[:1])))
        except Exception:  # this is no way to split it, then
            continue
        *errors, of_one = (max(d.error for d in differences_between(runner, one, large)) for one in (*parts, alone))
        if max(errors) <= tolerance < of_one:
            return candidate
    return None


# Losses.


class LossSplit:
    """The loss's value and gradients for a batch and for both of its parts: lists of vectors, each scaled to 1."""

    def __init__(self, rows: tuple[Rows, Rows], evaluate: Callable[[Rows | None], tuple[Sequence[Array], Any]]) -> None:
        self.rows = rows
        evaluated = [evaluate(some) for some in (None, *rows)]
        scales = [_largest(vector) or 1.0 for vector in evaluated[0][0]]
        self.whole, *self.parts = ([v / scale for v, scale in zip(one, scales)] for one, _ in evaluated)
        self.weights: list[float | None] = [weight for _, weight in evaluated[1:]]
        """What the user's function returned with the parts' losses."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(_largest(vector)) for one in (self.whole, *self.parts) for vector in one)

    def share(self, fits: float) -> float | None:
        a, b = self.parts
        across = [x - y for x, y in zip(a, b)]
        square = sum(_inner(x, x) for x in across)
        if square < 1e-16:
            return None
        t = sum(_inner(x, w - y) for x, w, y in zip(across, self.whole, b)) / square
        return t if all(_largest(w - (t * x + (1 - t) * y)) < fits for w, x, y in zip(self.whole, a, b)) else None

    def excess(self) -> list[Array]:
        return [x + y - w for w, x, y in zip(self.whole, *self.parts)]


def halves(units: Sequence[Sequence[int]], cuts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Ways to cut rows in two, with so many units in the first part."""
    random, found = Random(1), []
    for cut in cuts:
        order = random.sample(range(len(units)), len(units))
        first, second = ([row for place in sorted(part) for row in units[place]] for part in (order[:cut], order[cut:]))
        found.append((first, second))
    return found


class Leaf(NamedTuple):
    """A tensor of the batch, of which a loss may be a mean over some entries."""

    name: str
    """Such as `batch[1]['mask']`."""
    code: str
    """The same in the words of the user's function: `y['mask']`."""
    take: Callable[[Rows], Array]
    kind: Literal["whole", "bool", "float"]
    dims: int
    values: frozenset[int] | None = None
    """All values of whole numbers, where they are few."""
    is_negative: bool = False
    """Whether some number in it is below 0."""


@dataclass(frozen=True)
class LossFacts:
    """What a shell knows of a loss."""

    reduction: str
    weighed_by: str
    """What its micro-batches were weighed with, in words."""
    weigh: Callable[[Rows], float]
    """The same as a number."""
    leaves: Sequence[Leaf]
    arguments: Sequence[str]
    """What the user calls the parts of the batch."""
    unweighed: str
    """How to have micro-batches weighed by rows."""
    how_to_weigh: str
    """How to say what a loss divides by."""
    across_rows: str
    """What to do about a loss that looks across rows."""
    ignored: Sequence[int] = (-100, -1, 0)
    class_weights: Sequence[tuple[str, Array]] = ()
    causal: bool = False
    """Whether the model is a causal language model, which shifts its labels by one."""
    fits: float = FITS


def loss_cause(splits: Sequence[LossSplit], facts: LossFacts) -> Cause | None:
    """Why these losses don't add up to the large batch's, or None where nothing can be said.

    It takes splits of at least two ways to cut the rows in two.
    """
    if any(not split.is_finite for split in splits):
        return None
    shares = [share for split in splits if (share := split.share(facts.fits)) is not None]
    if len(shares) == len(splits) and all(-facts.fits < share < 1 + facts.fits for share in shares):
        return _wrong_weight(facts, splits, shares)
    excess = [split.excess() for split in splits]
    if all(_largest(vector) < facts.fits for one in excess for vector in one):
        return _sum(facts)
    if max(_largest(x - y) for one in excess for x, y in zip(one, excess[0])) < facts.fits:
        return Cause(
            "regulariser",
            "loss",
            "The loss adds a term that doesn't depend on the rows (a regulariser, such as a sum over the parameters) "
            "to a sum over them, so the term counts once per micro-batch: K times in a window of K. Multiply it by the "
            "share of the rows, as in `sum + penalty * len(x) / total_rows`; or return a mean over rows plus the term, "
            "which accumulates exactly.",
        )
    return coupling_cause(facts.across_rows)


def coupling_cause(advice: str) -> Cause:
    """A loss that is no mean or sum over rows; `advice` is what else it may be, and what to do."""
    return Cause(
        "loss",
        "loss",
        "The loss is not additive over rows: no weights make the parts add up to the large batch's. It looks across "
        f"the batch (contrastive, Dice, a batch mean or variance), or {advice}",
    )


def _sum(facts: LossFacts) -> Cause:
    if facts.reduction == "sum":
        return Cause(
            "weight",
            "loss",
            "The loss is a sum over its rows, but its weight is not: the weights of the parts don't add up to the "
            "large batch's. Let `weight` count something that adds up, such as rows or tokens.",
        )
    return Cause(
        "reduction",
        "loss",
        "The loss is a sum over its rows, or is divided by a number that doesn't depend on the micro-batch, but was "
        'treated as a mean. Pass reduction="sum".',
    )


def _wrong_weight(facts: LossFacts, splits: Sequence[LossSplit], shares: list[float]) -> Cause | None:
    def agree(counted: Sequence[Sequence[float]]) -> bool:
        found = [pair[0] / sum(pair) if sum(pair) else 0.0 for pair in counted]
        return all(abs(one - other) < 1e-5 for one, other in zip(shares, found))

    def fits(count: Callable[[Rows], float]) -> bool:
        counted = [[count(rows) for rows in split.rows] for split in splits]
        return all(min(pair) >= 0 and sum(pair) > 0 for pair in counted) and agree(counted)

    weighed = [[facts.weigh(r) if w is None else w for r, w in zip(split.rows, split.weights)] for split in splits]
    if facts.reduction == "mean" and agree(weighed):
        return None  # weighed right: the loss is not what differs
    returned = splits[0].weights[0] is not None
    was = "what `compute_loss` returns with the loss" if returned else facts.weighed_by
    found = next((candidate for candidate in _candidates(facts) if fits(candidate.count)), None)
    if found is None:
        sizes = [len(rows) for rows in splits[0].rows]
        message = (
            f"The loss is a mean, but not over {was}: micro-batches of {sizes[0]} and {sizes[1]} "
            f"rows would have to weigh {shares[0]:.4g} to {1 - shares[0]:.4g}. Neither rows, targets that are not "
            f"ignored, masks nor class weights fit. {facts.how_to_weigh}"
        )
        return Cause("weight", "loss", message)
    unsure, shifted = "", found.shifted
    if shifted is not None and fits(shifted.count):  # the first column is ignored in every row, say
        by_code = (
            f" If the model shifts its labels by one, as causal language models do, use {shifted.code} instead: this "
            "batch can't tell."
        )
        by_model = " The model shifts its labels by one, which this batch alone doesn't show."
        found, unsure = (shifted, by_model) if facts.causal else (found, by_code)
    keywords = ['reduction="mean"'] if facts.reduction == "sum" else []
    keywords += [f"weight=lambda {', '.join(facts.arguments)}: {found.code}"] if found.code else []
    advice = f"Pass {', '.join(keywords)}" if keywords else facts.unweighed
    message = f"The loss is a mean over {found.name}, but its micro-batches were weighed by {was}. "
    return Cause("weight", "loss", f"{message}{advice}: that makes them exact.{unsure}")


@dataclass(frozen=True)
class _Candidate:
    """What a mean may be over: in words, as code, and counted."""

    name: str
    code: str
    count: Callable[[Rows], float]
    shifted: _Candidate | None = None
    """The same from the second position on."""


def _candidates(facts: LossFacts) -> Iterator[_Candidate]:
    yield _Candidate("rows", "", lambda rows: float(len(rows)))
    # A mask may agree with the labels here, and not where a prompt has none.
    counted = sorted((leaf for leaf in facts.leaves if leaf.kind != "float"), key=lambda leaf: "label" not in leaf.name)
    for leaf in counted:  # the entries that are set, and those that are not ignored
        if leaf.kind == "bool" or (leaf.values is not None and leaf.values <= {0, 1}):
            yield _summing(leaf, f"the entries of {leaf.name} that are set")
        for index in facts.ignored:
            shifted = _counting(leaf, index, ", from the second position on,", "[:, 1:]") if leaf.dims > 1 else None
            yield replace(_counting(leaf, index), shifted=shifted)
            if shifted is not None:
                yield shifted
    for leaf in counted:
        yield from _weighings(leaf, facts)
    for leaf in facts.leaves:
        if leaf.kind == "float" and not leaf.is_negative:
            yield _summing(leaf, f"the weights in {leaf.name}")
            yield _counting(leaf, 0)


def _summing(leaf: Leaf, name: str) -> _Candidate:
    return _Candidate(name, f"{leaf.code}.sum()", lambda rows: float(leaf.take(rows).sum()))


def _counting(leaf: Leaf, index: int, where: str = "", part: str = "") -> _Candidate:
    def count(rows: Rows) -> float:
        taken = leaf.take(rows)
        return float(((taken[:, 1:] if part else taken) != index).sum())

    return _Candidate(
        f"the entries of {leaf.name}{where} that are not {index}", f"({leaf.code}{part} != {index}).sum()", count
    )


def _weighings(leaf: Leaf, facts: LossFacts) -> Iterator[_Candidate]:
    def count(index: int, weights: Array, rows: Rows) -> float:
        taken = leaf.take(rows)
        return float(weights[taken[taken != index]].sum())

    for name, weights in facts.class_weights if leaf.kind == "whole" else ():
        for index in facts.ignored:
            if leaf.values is not None and leaf.values <= {*range(len(weights)), index}:
                what = f"the sum of the class weights `{name}` of {leaf.name}"
                code = f"{name}[{leaf.code}[{leaf.code} != {index}]].sum()"
                yield _Candidate(what, code, functools.partial(count, index, weights))


def _largest(vector: Array) -> float:
    return float(abs(vector).max()) if len(vector) else 0.0


def _inner(one: Array, other: Array) -> float:
    return float((one.conj() * other).sum().real)
