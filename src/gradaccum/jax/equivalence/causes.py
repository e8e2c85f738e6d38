"""Why micro-batches differ from the large batch: the loss, its weight, the state or an input, by name."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.core.causes import LossFacts, LossSplit, coupling_cause, loss_cause
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.numpy_arrays import leaf_of
from gradaccum.core.proof import Outcome, differences_between
from gradaccum.jax.equivalence.trial import Trial
from gradaccum.jax.loss import Verdict

_FITS = 1e-4
"""What shares and sums may be off by: causes differ by far more."""


def find_causes(
    trial: Trial, order: np.ndarray, size: int, differences: Sequence[Difference], allowed: float, verdict: Verdict
) -> Cause:
    """The most certain cause."""
    wrong = [difference for difference in differences if not difference.error <= allowed]
    moved = [difference.name for difference in wrong if difference.part == "buffer"]
    if verdict.kind == "randomness":
        return Cause("randomness", "loss", verdict.message)
    if len(moved) == len(wrong):
        return Cause(
            "buffer",
            moved[0],
            f"The state {moved[0]!r} moves once per micro-batch, each time from where the last one left it and with "
            "the statistics of fewer rows. Loss and gradient are the large batch's.",
        )
    cause = _of_an_input(trial, order, size, allowed) or loss_cause(_splits(trial, order), _facts(trial))
    if cause is not None and cause.kind == "loss":  # nothing that is known of it says more
        cause = None
    seen = verdict.kind if verdict.certain else ""
    if seen and seen != "batch_norm" and (cause is None or cause.kind not in (seen, "input")):
        return Cause(seen, "loss", verdict.message)  # type: ignore[arg-type]  # its kinds are causes' kinds
    if cause is None and moved:
        return Cause(
            "batch_norm",
            moved[0],
            f"A row's output depends on the other rows of its micro-batch, and the state {moved[0]!r} moves with them, "
            "as BatchNorm's statistics do in training mode. Freeze it (use its running averages), or take GroupNorm or "
            "LayerNorm.",
        )
    return cause or coupling_cause(_ACROSS_ROWS)


_ACROSS_ROWS = (
    "a layer does (BatchNorm in training mode). For the former use gradaccum.jax.chunked around the model, which gives "
    "the large batch's gradient for any loss."
)


def _splits(trial: Trial, order: np.ndarray) -> list[LossSplit]:
    """The rows in two parts, each evaluated by itself."""
    splits, cut = [], max(1, (3 * len(order)) // 8)
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(order)
        first, second = shuffled[:cut], shuffled[cut:]
        parts = [trial.vector(first)], [trial.vector(second)]
        splits.append(LossSplit((first, second), [trial.vector(shuffled)], parts))
    return splits


def _facts(trial: Trial) -> LossFacts:
    """What is known of the loss, in the user's words."""
    is_mean = trial.options["reduction"] == "mean"
    weighed = "what `weight` returns" if trial.options["weight"] is not None else "rows"
    return LossFacts(
        trial.options["reduction"],
        weighed if is_mean else "nothing, because they were treated as sums",
        trial.weight,
        [
            leaf_of(path, path, np.moveaxis(np.asarray(leaf), axis, 0))
            for path, axis, leaf in trial.leaves()
            if axis is not None and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ],
        [trial.names[number] for number in trial.batches],
        "Leave `weight` out",
        "Pass weight=, a function of the batch that returns what the loss divides by.",
        _ACROSS_ROWS,
        fits=_FITS,
    )


def _of_an_input(trial: Trial, order: np.ndarray, size: int, allowed: float) -> Cause | None:
    """The leaf of the batch without whose split nothing differs."""
    split = [(position, path) for position, (path, axis, _) in enumerate(trial.leaves()) if axis is not None]
    large: Outcome | None = None
    for position, path in split if len(split) > 1 else ():
        axes = list(trial.batch.axes)
        axes[position] = None
        in_axes = jax.tree.unflatten(trial.batch.structure, axes)
        in_axes = in_axes if isinstance(trial.options["batch_argnums"], tuple | list) else in_axes[0]
        try:
            found = trial.outcome(order, size, in_axes, position)
            part = trial.outcome(order[:size], size, in_axes, position)
        except Exception:  # the shapes say that it is to be split
            continue
        large = large or trial.outcome(order, trial.rows, in_axes, position)
        alone, right = (differences_between(trial, outcome, large) for outcome in (part, found))
        counts_alone = all(each.error <= allowed for each in alone)  # nothing hangs on the other leaves
        if not counts_alone and all(each.error <= allowed for each in right):
            return Cause(
                "input",
                path,
                f"{path} is split into micro-batches, but every row needs all of it. Pass in_axes with None for it.",
            )
    return None
