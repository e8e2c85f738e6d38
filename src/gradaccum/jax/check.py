"""`check_equivalence`: the gradient of the large batch against that of micro-batches, and what makes them differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gradaccum.core.causes import nondeterminism_cause
from gradaccum.core.equivalence import Equivalence
from gradaccum.core.numpy_arrays import numbers_of_rows
from gradaccum.core.proof import Comparison
from gradaccum.core.ways import even_ways
from gradaccum.jax.proof import Trial, find_causes
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
        trial = Trial(loss_fn, (params, batch, *more), options, tolerance)
        if trial.rows < 2:
            raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {trial.rows}.")
        return _checked(trial, micro_batch_size, tolerance)


def _checked(trial: Trial, micro_batch_size: int | None, tolerance: float | None) -> Equivalence:
    columns = numbers_of_rows(trial.arrays().items())
    comparison = Comparison(trial, even_ways(trial.rows, micro_batch_size, columns), "differs")
    comparison.check_loss()
    differences, verdict, allowed = comparison.judged() or [], trial.verdict(), trial.tolerance
    failing, causes = comparison.failing(allowed), comparison.raised()
    if comparison.unrepeated:
        causes = [nondeterminism_cause(comparison.unrepeated, "callbacks, which may have a state of their own")]
    if failing and not causes:
        causes = [find_causes(trial, failing, differences, verdict)]
    notes = []
    if trial.holds_keys:
        notes.append("Random numbers, such as those of dropout, were the same for each row.")
    if not failing:
        if verdict.certain and verdict.kind != "exact":
            notes.append(
                "This batch doesn't show the difference that others will; value_and_grad refuses the loss: "
                f"{verdict.message}"
            )
        else:
            known_exact(trial.loss_fn)
    return comparison.record(differences, causes, allowed, notes)
