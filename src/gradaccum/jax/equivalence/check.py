"""Prove it: the gradient of the large batch against that of micro-batches, and the culprit's name where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gradaccum.core.equivalence import Cause, Equivalence, limits_of
from gradaccum.core.proof import Comparison, Way, worst
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.jax.equivalence.causes import find_causes
from gradaccum.jax.equivalence.trial import Trial
from gradaccum.jax.train_step import known_exact
from gradaccum.schedule import checked_count


def check_equivalence(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *more: Any,
    micro_batch_size: int | None = None,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    in_axes: Any = 0,
    weight: Callable[..., Any] | None = None,
    reduction: str = "mean",
    has_aux: bool = False,
    rng_argnum: int | None = None,
    state_argnum: int | None = None,
    tolerance: float | None = None,
) -> Equivalence:
    """Test whether micro-batches give the large batch's gradient, and name the cause if they don't.

    On float64 copies, it compares loss, gradients and new state of the batch at once with those of several partitions
    of its rows, ragged and shuffled ones among them. The error of an array is `max|a - b| / max|b|`. Keys that
    `rng_argnum` names draw the same for each row. It is evidence for this loss and batch, not a proof. Call it outside
    `jax.jit`.

    Args:
        loss_fn: As for `value_and_grad`.
        params: Its first argument.
        batch: Its second one; the large batch has 2 rows or more, better 8.
        more: Its others.
        micro_batch_size: Rows of the micro-batches in one of the partitions; None: ragged ones only.
        argnums, batch_argnums, in_axes, weight, reduction: As for `value_and_grad`.
        has_aux, rng_argnum, state_argnum: As for `value_and_grad`. The aux is not compared.
        tolerance: The largest relative error that counts as rounding; None: by the dtype that the loss computes in, if
            that is not the float64 it is given.

    Returns:
        A record that prints, with `.ok`, `.max_error`, `.causes`, `.save()` and `.raise_if_different()`.

    Raises:
        TypeError, ValueError: An option isn't as described, there is only one row, or the large batch's own loss is not
            finite.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss_fn(w, batch):                                  # a mean over the targets that count
        ...     x, y = batch
        ...     return jnp.where(y != -1, (x @ w - y) ** 2, 0).sum() / (y != -1).sum()
        >>> batch = jnp.arange(24.0).reshape(8, 3), jnp.array([1, -1, -1, 0, 1, -1, 0, 1])
        >>> result = check_equivalence(loss_fn, jnp.ones(3), batch)
        >>> result.ok, result.causes[0].message[-72:]
        (False, 'Pass weight=lambda batch: (batch[1] != -1).sum(): that makes them exact.')
        >>> check_equivalence(loss_fn, jnp.ones(3), batch, weight=lambda batch: (batch[1] != -1).sum()).ok
        True
    """
    if micro_batch_size is not None:
        checked_count(micro_batch_size, "micro_batch_size")
    options = {
        "argnums": argnums, "batch_argnums": batch_argnums, "in_axes": in_axes, "weight": weight, "has_aux": has_aux,
        "reduction": reduction, "rng_argnum": rng_argnum, "state_argnum": state_argnum,
    }  # fmt: skip
    with jax.enable_x64(True):
        trial = Trial(loss_fn, (params, batch, *more), options)
        if trial.rows < 2:
            raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {trial.rows}.")
        return _checked(trial, micro_batch_size, tolerance)


def _checked(trial: Trial, micro_batch_size: int | None, tolerance: float | None) -> Equivalence:
    rows, precision, device = trial.rows, trial.precision(), jax.default_backend()
    allowed = trial.tolerance = rounding(precision, device) if tolerance is None else tolerance
    comparisons = [_compared(trial, order, ways) for order, ways in _partitions(rows, micro_batch_size)]
    found = sorted((one for each in comparisons for one in each.compared), key=lambda one: -one.error)
    differences = worst(d for one in found if one.distances for d in one.differences)
    causes = [*filter(None, map(_failure, comparisons))][:1]
    differs, verdict = not found[0].error <= allowed, trial.verdict()
    if differs and not causes:
        order, parts = found[0].way
        causes = [find_causes(trial, np.asarray(order), max(parts), differences, allowed, verdict)]
    notes = limits_of(rows)
    if trial.holds_keys:
        notes.insert(0, "Random numbers, such as those of dropout, were the same for each row.")
    if verdict.certain and verdict.kind != "exact" and not differs:
        notes.append(
            "This batch doesn't show the difference that others will; value_and_grad refuses the loss: "
            f"{verdict.message}"
        )
    elif not differs:
        known_exact(trial.loss_fn)
    partitions = tuple(tuple(sizes) for each in comparisons for _, sizes in each.ways)
    return Equivalence(
        tuple(differences), allowed, tuple(causes), rows=rows, partitions=partitions, notes=tuple(notes),
        precision=precision, device=device,
    )  # fmt: skip


def _compared(trial: Trial, order: Sequence[int], ways: list[Way]) -> Comparison:
    comparison = Comparison(trial, order, ways, "differs")
    for loss in comparison.large.losses.values():
        if not np.isfinite(loss).all():
            raise ValueError(f"The large batch's own loss is {loss}: there is nothing to compare.")
    comparison.differences()
    return comparison


def _partitions(rows: int, micro_batch_size: int | None) -> list[tuple[Sequence[int], list[Way]]]:
    """Orders of the rows, and ways to cut them: into the sizes that are asked for, and into ragged ones."""
    # A size that gives micro-batches of different sizes, if these rows can have that.
    ragged = next((size for size in range(rows - 1, 0, -1) if len(set(even_sizes(rows, size))) > 1), 1)
    given = [] if micro_batch_size is None or micro_batch_size >= rows else [micro_batch_size]
    shuffled = np.random.default_rng(0).permutation(rows).tolist()
    some = ((range(rows), [*given, ragged]), (shuffled, [ragged]))
    return [(order, [(order, even_sizes(rows, size)) for size in sizes]) for order, sizes in some]


def _failure(comparison: Comparison) -> Cause | None:
    """What the loss raises in micro-batches, and not on the large batch."""
    failed = [sizes for (_, sizes), _, distances in comparison.compared if not distances]
    if not failed:
        return None
    first_line = (str(comparison.error).strip().splitlines() or [""])[0]
    message = f"rows the loss raises {type(comparison.error).__name__}: {first_line} The large batch does not."
    of = " + ".join(map(str, failed[0]))
    return Cause("error", "loss", f"In micro-batches of {of} {message} Write it for any number of rows.")
