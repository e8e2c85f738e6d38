"""Why micro-batches differ from the large batch: the loss, its weight, the state or an input, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.core.equivalence import Cause, Difference
from gradaccum.jax.batch import drawn_shapes
from gradaccum.jax.equivalence.trial import Outcome, Trial
from gradaccum.jax.loss import Verdict

__all__ = ["find_causes"]

_FITS = 1e-4
"""What shares and sums may be off by: causes differ by far more."""


def find_causes(
    trial: Trial, order: np.ndarray, size: int, differences: Sequence[Difference], allowed: float, verdict: Verdict
) -> list[Cause]:
    """The most certain cause first; at least one.

    Args:
        trial: The loss and the batch.
        order: The rows, in the order in which they differed.
        size: The size of micro-batches at which they did.
        differences: What was compared.
        allowed: The largest error that is rounding.
        verdict: What is seen of the loss without evaluating it.
    """
    wrong = [difference for difference in differences if not difference.error <= allowed]
    if _draws_for_rows(trial):
        return [
            Cause(
                "randomness",
                "loss",
                "The loss draws random numbers for its rows from a key that it does not name. Each micro-batch would "
                "draw the same ones. Name the argument that is the key, rng_argnum=..., and each gets a part of it.",
            )
        ]
    if all(difference.part == "buffer" for difference in wrong):
        return [
            Cause(
                "buffer",
                wrong[0].name,
                f"The state {wrong[0].name!r} moves once per micro-batch, each time from where the one before has left "
                "it, and with the statistics of fewer rows. Loss and gradient are the large batch's.",
            )
        ]
    splits = [_Split(trial, order, np.random.default_rng(seed)) for seed in range(3)]
    cause = _of_an_input(trial, order, size, allowed) or _of_the_loss(trial, splits)
    seen = verdict.kind if verdict.certain else ""
    if seen and seen != "batch_norm" and (cause is None or cause.kind not in (seen, "input")):
        return [Cause(seen, "loss", verdict.message)]  # type: ignore[arg-type]  # its kinds are causes' kinds
    if cause is not None:
        return [cause]
    moved = [difference.name for difference in wrong if difference.part == "buffer"]
    if moved:
        return [
            Cause(
                "batch_norm",
                moved[0],
                f"A row's output depends on the other rows of its micro-batch, and the state {moved[0]!r} moves with "
                "them, as BatchNorm's statistics do in training mode. Freeze it (use its running averages), or take "
                "GroupNorm or LayerNorm.",
            )
        ]
    return [
        Cause(
            "loss",
            "loss",
            "The loss is not additive over rows: no weights make the parts add up to the large batch's. It looks "
            "across the batch (contrastive, Dice, a batch mean or variance), or a layer does (BatchNorm in training "
            "mode). For the former use gradaccum.jax.chunked around the model, which gives the large batch's gradient "
            "for any loss.",
        )
    ]


def _draws_for_rows(trial: Trial) -> bool:
    if trial.holds_keys:
        return False
    rows = np.arange(trial.rows)
    return drawn_shapes(trial.jaxpr(rows)) != drawn_shapes(trial.jaxpr(rows[:-1]))


class _Split:
    """The rows in two parts, each evaluated by itself."""

    def __init__(self, trial: Trial, order: np.ndarray, random: np.random.Generator) -> None:
        shuffled = random.permutation(order)
        first = max(1, (3 * len(order)) // 8)
        self.rows = shuffled[:first], shuffled[first:]
        self.whole = _vector(trial, shuffled)
        self.parts = [_vector(trial, rows) for rows in self.rows]

    def share(self) -> float | None:
        """s of `whole = s first + (1 - s) second`; None where there is none."""
        first, second = self.parts
        across, target = first - second, self.whole - second
        if not np.vdot(across, across).real:
            return None
        share = (np.vdot(across, target) / np.vdot(across, across)).real
        residual = np.abs(target - share * across).max()
        return float(share) if residual <= _FITS * np.abs(self.whole).max() else None

    def excess(self) -> np.ndarray:
        """What the sum of the parts has too much, relative to the whole."""
        return (self.parts[0] + self.parts[1] - self.whole) / np.abs(self.whole).max()


def _vector(trial: Trial, rows: np.ndarray) -> np.ndarray:
    return trial.outcome(rows, len(rows)).vector


def _of_the_loss(trial: Trial, splits: list[_Split]) -> Cause | None:
    if any(not np.isfinite(part).all() for split in splits for part in split.parts):
        return None
    shares = [split.share() for split in splits]
    if all(share is not None and -_FITS < share < 1 + _FITS for share in shares):
        return _wrong_weight(trial, splits, [share for share in shares if share is not None])
    excess = [split.excess() for split in splits]
    if all(np.abs(each).max() < _FITS for each in excess) and trial.options["reduction"] == "mean":
        return Cause(
            "reduction",
            "loss",
            "The loss is a sum over its rows, or is divided by a number that doesn't depend on the micro-batch, and "
            'was taken to be a mean. Pass reduction="sum".',
        )
    if max(np.abs(each - excess[0]).max() for each in excess) < _FITS:
        return Cause(
            "regulariser",
            "loss",
            "The loss has a term that doesn't depend on the rows (a regulariser, such as a sum over the parameters) "
            "beside a sum over them, so it is counted once per micro-batch. Return a mean over rows plus the term, "
            "which accumulates exactly.",
        )
    return None


def _wrong_weight(trial: Trial, splits: list[_Split], shares: list[float]) -> Cause | None:
    declared = [[trial.weight(rows) for rows in split.rows] for split in splits]
    is_mean = trial.options["reduction"] == "mean"
    if is_mean and all(_close(share, _share(weights)) for share, weights in zip(shares, declared)):
        return None  # weighed right: the loss is not what differs
    weighed = "what `weight` returns" if trial.options["weight"] is not None else "rows"
    was = weighed if is_mean else "nothing, being taken for sums"

    def fits(count: Any) -> bool:
        counted = [[count(rows) for rows in split.rows] for split in splits]
        return all(min(c) >= 0 and sum(c) > 0 and _close(s, _share(c)) for s, c in zip(shares, counted))

    found = next(((name, code) for name, code, count in _candidates(trial) if fits(count)), None)
    if found is None:
        first, second = (len(rows) for rows in splits[0].rows)
        return Cause(
            "weight",
            "loss",
            f"The loss is a mean, but not over {was}: micro-batches of {first} and {second} rows would have to weigh "
            f"{shares[0]:.4g} to {1 - shares[0]:.4g}. Tried rows, targets that are not ignored, and masks; none of "
            "them is it. Pass weight=, a function of the batch that returns what the loss divides by.",
        )
    name, code = found
    names = ", ".join(trial.names[n] for n in trial.batches)
    advice = [] if is_mean else ['reduction="mean"']
    advice += [f"weight=lambda {names}: {code}"] if code else []
    return Cause(
        "weight",
        "loss",
        f"The loss is a mean over {name}, but its micro-batches were weighed by {was}. "
        f"{'Pass ' + ', '.join(advice) if advice else 'Leave `weight` out'}: that makes them exact.",
    )


def _candidates(trial: Trial) -> Iterator[tuple[str, str, Any]]:
    """`(what, its code, its count for rows)` of what a mean may be over."""
    yield "rows", "", lambda rows: float(len(rows))
    for path, axis, leaf in trial.leaves():
        if axis is None or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        values = np.moveaxis(np.asarray(leaf), axis, 0)
        if np.issubdtype(values.dtype, np.integer) or values.dtype == bool:
            if values.dtype == bool or set(np.unique(values)) <= {0, 1}:
                yield f"the entries of {path} that are set", f"{path}.sum()", lambda r, v=values: float(v[r].sum())
            for ignored in (-100, -1, 0):
                yield (
                    f"the entries of {path} that are not {ignored}",
                    f"({path} != {ignored}).sum()",
                    lambda r, v=values, i=ignored: float((v[r] != i).sum()),
                )
        elif np.issubdtype(values.dtype, np.floating) and (values >= 0).all():
            yield f"the weights in {path}", f"{path}.sum()", lambda r, v=values: float(v[r].sum())
            yield (
                f"the entries of {path} that are not 0",
                f"({path} != 0).sum()",
                lambda r, v=values: float((v[r] != 0).sum()),
            )


def _of_an_input(trial: Trial, order: np.ndarray, size: int, allowed: float) -> Cause | None:
    """The leaf of the batch without whose split nothing differs."""
    leaves = trial.leaves()
    if len([axis for _, axis, _ in leaves if axis is not None]) < 2:
        return None
    whole: Outcome | None = None
    for position, (path, axis, _) in enumerate(leaves):
        if axis is None:
            continue
        axes = list(trial.batch.axes)
        axes[position] = None
        in_axes = jax.tree.unflatten(trial.batch.structure, [_Axis(each) for each in axes])
        in_axes = jax.tree.map(lambda each: each.axis, in_axes, is_leaf=lambda each: isinstance(each, _Axis))
        in_axes = in_axes if isinstance(trial.options["batch_argnums"], tuple | list) else in_axes[0]
        try:
            found = trial.outcome(order, size, in_axes, position)
            part = trial.outcome(order[:size], size, in_axes, position)
        except Exception:  # the shapes say that it is to be split
            continue
        whole = whole or trial.outcome(order, trial.rows, in_axes, position)
        counts_alone = all(each.error <= allowed for each in part.differences(whole))  # nothing hangs on the others
        if not counts_alone and all(each.error <= allowed for each in found.differences(whole)):
            return Cause(
                "input",
                path,
                f"{path} is split into micro-batches, and every row needs all of it. Pass in_axes with None for it.",
            )
    return None


class _Axis:
    """A leaf that may be None."""

    def __init__(self, axis: int | None) -> None:
        self.axis = axis


def _share(weights: Sequence[float]) -> float:
    return weights[0] / sum(weights) if sum(weights) else 0.0


def _close(a: float, b: float) -> bool:
    return abs(a - b) < 1e-5
