"""Rows of a batch, whole and in micro-batches, in double precision: the adapter of JAX for a proof."""

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

from gradaccum.core.numpy_arrays import ArrayRunner, largest
from gradaccum.core.proof import Outcome
from gradaccum.core.ways import Way
from gradaccum.jax.batch import Batch, argument_names, argument_numbers, axes_of_each, equations
from gradaccum.jax.loss import Verdict
from gradaccum.jax.train_step import judge_loss, value_and_grad

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
