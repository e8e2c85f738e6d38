"""Prove it: the gradient of the large batch against that of micro-batches, and the culprit's name where they differ."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_prng_impl

from gradaccum.core.causes import (
    LossFacts,
    LossSplit,
    coupling_cause,
    halves,
    loss_cause,
    nondeterminism_cause,
    shared_input,
)
from gradaccum.core.equivalence import Cause, Difference, Equivalence
from gradaccum.core.numpy_arrays import ArrayRunner, largest, leaf_of, numbers_of_rows
from gradaccum.core.proof import Comparison, Outcome
from gradaccum.core.ways import Way, even_ways
from gradaccum.jax.batch import Batch, argument_names, argument_numbers, axes_of_each, equations
from gradaccum.jax.loss import Verdict
from gradaccum.jax.train_step import judge_loss, known_exact, value_and_grad
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


# Rows whole and in micro-batches, in double precision.

SMALL = 1e-2
"""Gradients that are smaller than the largest one by this factor are measured by that one: where a gradient is zero,
all of it is rounding."""


class Trial(ArrayRunner):
    """Runs rows of a batch by `value_and_grad`, with the user's loss, arguments and keywords, in float64."""

    def __init__(self, loss_fn: Any, args: tuple[Any, ...], options: dict[str, Any], tolerance: float | None) -> None:
        self.loss_fn, self.options = loss_fn, dict(options)
        self.names = argument_names(loss_fn, range(len(args)))
        self.batches = argument_numbers("batch_argnums", options["batch_argnums"])
        self.state_argnum = options["state_argnum"]
        self._key = key = self.options.pop("rng_argnum")
        # Held keys draw the same for each row, and for each micro-batch: all of them share the key.
        self.holds_keys = key is not None
        self.args = tuple(
            jax.tree.map(_held, arg) if number == key else jax.tree.map(_in_double, arg)
            for number, arg in enumerate(args)
        )
        axes = axes_of_each(options["in_axes"], options["batch_argnums"])
        names = tuple(self.names[n] for n in self.batches)
        self.batch = Batch(tuple(self.args[n] for n in self.batches), axes, names)
        self.rows = self.batch.rows
        self._compiled: dict[Any, Any] = {}
        self.precision, self.device, self._tolerance = self._precision(), jax.default_backend(), tolerance
        self._shared: int | None = None

    @property
    def tolerance(self) -> float:
        return super().tolerance if self._tolerance is None else self._tolerance

    def sharing(self, position: int) -> Trial:
        """The same where all micro-batches share this leaf of the batch."""
        other = copy.copy(self)
        other._shared = position
        return other

    @contextlib.contextmanager
    def moved(self, seed: int, *, far: bool = False) -> Iterator[Trial]:
        there, factors = copy.copy(self), self.factors(seed, far=far)

        def moved(leaf: Any) -> Any:
            inexact = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
            return leaf * factors(leaf.shape).astype(leaf.dtype) if inexact else leaf

        given = (*self.batches, self._key)
        there.args = tuple(arg if number in given else jax.tree.map(moved, arg) for number, arg in enumerate(self.args))
        yield there

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether memory ran out."""
        return "RESOURCE_EXHAUSTED" in str(error)

    def run(self, way: Way | None) -> Outcome:
        rows, sizes = way or (range(self.rows), [self.rows])
        value, gradients = self._function(max(sizes))(*self.taken(rows))
        state: Any = {}
        if self.options["has_aux"] or self.state_argnum is not None:
            value, more = value
            if self.state_argnum is not None:
                state = more[0] if self.options["has_aux"] else more
        losses = value if isinstance(value, dict) else {"loss": value}
        argnums = self.options["argnums"]
        named: Any = gradients
        if isinstance(argnums, tuple | list):
            named = {self.names[n]: gradient for n, gradient in zip(argnums, gradients)}
        elif jax.tree_util.all_leaves([gradients]):
            named = {self.names[argnums]: gradients}
        if jax.tree_util.all_leaves([state]):
            state = {self.names[self.state_argnum]: state}
        gradients = _flat(named)
        scale = SMALL * max(map(largest, gradients.values()), default=0.0)
        moved = {name: array for name, array in _flat(state).items() if np.issubdtype(array.dtype, np.number)}
        return Outcome(_flat(losses), gradients, moved, dict.fromkeys(gradients.keys() - moved.keys(), scale))

    def _function(self, size: int) -> Callable[..., Any]:
        """Value and gradients by micro-batches of this size, compiled once."""
        key = size, self._shared
        if key not in self._compiled:
            options = self.options | {"micro_batch_size": size, "aux": "last", "verify": False}
            if self._shared is not None:
                axes = [None if position == self._shared else axis for position, axis in enumerate(self.batch.axes)]
                in_axes = jax.tree.unflatten(self.batch.structure, axes)
                options["in_axes"] = in_axes if isinstance(options["batch_argnums"], tuple | list) else in_axes[0]
            self._compiled[key] = jax.jit(value_and_grad(self.loss_fn, **options))
        return self._compiled[key]

    def vector(self, rows: Sequence[int] | None) -> tuple[list[np.ndarray], None]:
        """Loss and gradients of these rows at once, in one; None: of all."""
        outcome = self.run(None if rows is None else (rows, [len(rows)]))
        parts = [*outcome.losses.values(), *outcome.gradients.values()]
        return [np.concatenate([np.ravel(part).astype(np.complex128) for part in parts])], None

    def taken(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """The arguments, with these rows of the batch."""
        leaves = [
            leaf if axis is None or position == self._shared else jnp.take(leaf, np.asarray(rows), axis=axis)
            for position, (leaf, axis) in enumerate(zip(self.batch.leaves, self.batch.axes))
        ]
        parts = jax.tree.unflatten(self.batch.structure, leaves)
        replaced = dict(zip(self.batches, parts))
        return tuple(replaced.get(n, arg) for n, arg in enumerate(self.args))

    def weight(self, rows: Sequence[int]) -> float:
        """What these rows were declared to weigh."""
        if self.options["weight"] is None:
            return float(len(rows))
        args = self.taken(rows)
        return float(self.options["weight"](*(args[n] for n in self.batches)))

    def leaves(self) -> list[tuple[str, int | None, Any]]:
        """`(path, axis of its rows, array)` of each leaf of the batch, such as `batch['y']`."""
        return list(zip(self.batch.paths, self.batch.axes, self.batch.leaves, strict=True))

    def arrays(self) -> dict[str, np.ndarray]:
        """Those that have rows, and no keys, by their paths, with rows in front."""
        return {
            path: np.moveaxis(np.asarray(leaf), axis, 0)
            for path, axis, leaf in self.leaves()
            if axis is not None and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        }

    def verdict(self) -> Verdict:
        """What is seen of the loss without evaluating it."""
        try:
            return judge_loss(self.loss_fn, self.args, self.options | {"aux": "last"})
        except Exception:  # the comparison says what is wrong
            return Verdict("unknown")

    def _precision(self) -> str:
        """The narrowest dtype that the loss computes in, whatever it is given."""
        order = ["float64", "float32", "bfloat16", "float16"]
        found = {"float64"}
        for equation in equations(jax.make_jaxpr(self.loss_fn)(*self.args).jaxpr):
            for variable in equation.outvars:
                name = str(getattr(variable.aval, "dtype", "")).replace("complex64", "float32")
                found |= {name} & set(order)
        return max(found, key=order.index)


def _in_double(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype") or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.asarray(leaf, jnp.complex128)
    return jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.asarray(leaf)


def _flat(tree: Any) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in found}


# Keys that draw the same for each row, so that random numbers don't hang on the size of a micro-batch.


@functools.cache
def _implementation() -> Any:
    """Threefry, whose numbers along the first axis are all the same."""

    def random_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
        if not shape:
            return threefry_prng_impl.random_bits(key, bit_width, shape)
        return jnp.broadcast_to(threefry_prng_impl.random_bits(key, bit_width, (1, *shape[1:])), shape)

    return define_prng_impl(
        key_shape=(2,),
        seed=threefry_prng_impl.seed,
        split=threefry_prng_impl.split,
        random_bits=random_bits,
        fold_in=threefry_prng_impl.fold_in,
        name="gradaccum_held",
        tag="held",
    )


def _held(key: Any) -> Any:
    """A key in place of this one, typed or not."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return jax.random.wrap_key_data(data[..., :2], impl=_implementation())


# Why they differ: the loss, its weight, the state or an input, by name.

_FITS = 1e-4
"""What shares and sums may be off by: causes differ by far more."""


def find_causes(trial: Trial, ways: Sequence[Way], differences: Sequence[Difference], verdict: Verdict) -> Cause:
    """The most certain cause."""
    wrong = [difference for difference in differences if not difference.error <= trial.tolerance]
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
    if (path := _shared_input(trial, ways)) is not None:
        what = "is split into micro-batches, but every row needs all of it. Pass in_axes with None for it."
        return Cause("input", path, f"{path} {what}")
    told, seen = _told_by_splits(trial), verdict.kind if verdict.certain and verdict.kind != "batch_norm" else ""
    if seen and (told is None or told.kind != seen):
        return Cause(seen, "loss", verdict.message)  # type: ignore[arg-type]  # its kinds are causes' kinds
    if told is None and moved:
        return Cause(
            "batch_norm",
            moved[0],
            f"A row's output depends on the other rows of its micro-batch, and the state {moved[0]!r} moves with them, "
            "as BatchNorm's statistics do in training mode. Freeze it (use its running averages), or take GroupNorm or "
            "LayerNorm.",
        )
    return told or coupling_cause(_ACROSS_ROWS)


_ACROSS_ROWS = (
    "a layer does (BatchNorm in training mode). For the former use gradaccum.jax.chunked around the model, which gives "
    "the large batch's gradient for any loss."
)


def _shared_input(trial: Trial, ways: Sequence[Way]) -> str | None:
    split = {path: position for position, (path, axis, _) in enumerate(trial.leaves()) if axis is not None}
    others = [(path, functools.partial(trial.sharing, position)) for path, position in split.items() if len(split) > 1]
    return shared_input(others, ways, trial.tolerance)


def _told_by_splits(trial: Trial) -> Cause | None:
    """What is wrong with the loss, if it doesn't just look across rows, of which what is seen in it says more."""
    parts = halves([[row] for row in range(trial.rows)], [max(1, (3 * trial.rows) // 8)] * 3)
    cause = loss_cause([LossSplit(rows, trial.vector) for rows in parts], _facts(trial))
    return None if cause is None or cause.kind == "loss" else cause


def _facts(trial: Trial) -> LossFacts:
    """What is known of the loss, in the user's words."""
    is_mean = trial.options["reduction"] == "mean"
    weighed = "what `weight` returns" if trial.options["weight"] is not None else "rows"
    return LossFacts(
        trial.options["reduction"],
        weighed if is_mean else "nothing, because they were treated as sums",
        trial.weight,
        [leaf_of(path, path, array) for path, array in trial.arrays().items()],
        [trial.names[number] for number in trial.batches],
        "Leave `weight` out",
        "Pass weight=, a function of the batch that returns what the loss divides by.",
        _ACROSS_ROWS,
        fits=_FITS,
    )
