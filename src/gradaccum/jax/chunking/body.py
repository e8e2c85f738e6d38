"""The function that runs over a micro-batch, traced once for each size of them: what goes in, what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.jax.batch import Batch, Group, as_varying, drawn_shapes, varying_axes

__all__ = ["Body", "Traced"]


class Traced(NamedTuple):
    """`fn` on micro-batches of one size."""

    jaxpr: Any
    consts: list[Any]
    outputs: list[Any]


class Body:
    """`fn` with its arguments taken apart.

    Attributes:
        shared: Arrays of the arguments that are no batch.
        keys: Of the argument that is a key.
        rows: The arrays among the batch's leaves, by their position.
        structure: Of the outputs, once it is traced.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, batches: Any, key_numbers: Any, batch: Batch
    ) -> None:
        self.fn, self.batches, self.key_numbers, self.batch = fn, batches, key_numbers, batch
        others = [arg for n, arg in enumerate(args) if n not in (*batches, *key_numbers)]
        self.count = len(args)
        leaves, self._others = jax.tree.flatten((others, kwargs))
        self._static = [None if _is_array(leaf) else leaf for leaf in leaves]
        # In an enclosing `shard_map`: else each micro-batch's gradients would be summed over the devices.
        varying = varying_axes([leaf for leaf in batch.leaves if _is_array(leaf)])
        self.shared = [as_varying(jnp.asarray(leaf), varying) for leaf in leaves if _is_array(leaf)]
        self._dynamic = [_is_array(leaf) for leaf in leaves]
        self.keys, self._keys = jax.tree.flatten([args[n] for n in key_numbers])
        batch.leaves = [jnp.asarray(leaf) if _is_array(leaf) else leaf for leaf in batch.leaves]
        self.rows = [i for i, leaf in enumerate(batch.leaves) if _is_array(leaf)]
        self.axes = [batch.axes[i] for i in self.rows]
        self.structure: Any = None
        self._paths: list[str] = []
        self._traced: dict[int, Traced] = {}

    def __call__(self, shared: list[Any], micro_batch: list[Any], keys: list[Any]) -> list[Any]:
        """The outputs for one micro-batch, flat."""
        leaves = iter(shared)
        filled = [next(leaves) if dynamic else static for dynamic, static in zip(self._dynamic, self._static)]
        others, kwargs = jax.tree.unflatten(self._others, filled)
        parts = dict(zip(self.batches, self._batch_of(micro_batch)))
        parts |= dict(zip(self.key_numbers, jax.tree.unflatten(self._keys, keys)))
        remaining = iter(others)
        outputs = self.fn(*(parts[n] if n in parts else next(remaining) for n in range(self.count)), **kwargs)
        found, self.structure = jax.tree_util.tree_flatten_with_path(outputs)
        self._paths = [f"outputs{jax.tree_util.keystr(path)}" for path, _ in found]
        return [jnp.asarray(leaf) for _, leaf in found]

    def _batch_of(self, micro_batch: list[Any]) -> Any:
        leaves = list(self.batch.leaves)
        for position, leaf in zip(self.rows, micro_batch):
            leaves[position] = leaf
        return jax.tree.unflatten(self.batch.structure, leaves)

    def traced(self, group: Group) -> Traced:
        """`fn` on micro-batches of this group's size."""
        if group.size not in self._traced:
            self._traced[group.size] = self._trace(
                jax.eval_shape(lambda: self.micro_batch(self.batch.leaves, group, 0))
            )
        return self._traced[group.size]

    def micro_batch(self, leaves: list[Any], group: Group, index: Any) -> list[Any]:
        """The arrays of one micro-batch, of these leaves of the whole batch."""
        taken = self.batch.with_leaves(leaves).micro_batch(group, index)
        flat = jax.tree.structure(taken).flatten_up_to(taken)
        return [flat[position] for position in self.rows]

    def _trace(self, micro_batch: list[Any]) -> Traced:
        closed, outputs = jax.make_jaxpr(self, return_shape=True)(self.shared, micro_batch, self.keys)
        return Traced(closed.jaxpr, list(closed.consts), list(outputs))

    def check(self, groups: list[Group]) -> None:
        """Outputs have a row for each row, at two sizes, and keys that all share draw nothing for rows."""
        sizes = {group.size: self.traced(group) for group in groups}
        for size, traced in sizes.items():
            self._check_rows(size, traced.outputs)
        if len(sizes) == 1:
            (size,) = sizes
            other = size - 1 if size > 1 else 2
            with contextlib.suppress(Exception):  # a function that is written for one size
                sizes[other] = self._trace(jax.eval_shape(lambda: self._resized(other)))
        if len(sizes) == 1:
            return
        (size, one), (other, two) = sizes.items()
        self._check_rows(other, two.outputs)
        for path, a, b in zip(self._paths, one.outputs, two.outputs, strict=True):
            if a.shape[1:] != b.shape[1:]:
                raise ValueError(
                    f"{path} looks across the rows: micro-batches of {size} and {other} rows give {a.shape} and "
                    f"{b.shape}. {_OUTSIDE}"
                )
        if not self.keys and drawn_shapes(one.jaxpr) != drawn_shapes(two.jaxpr):
            raise ValueError(
                "The function draws random numbers for its rows from a key that all micro-batches share, so that each "
                "would draw the same ones. Name the argument that is the key, rng_argnum=..., and each micro-batch "
                "gets one that is split off; or give each row a key of its own, as a part of the batch."
            )

    def _resized(self, size: int) -> list[Any]:
        leaves = [self.batch.leaves[position] for position in self.rows]
        return [
            leaf if axis is None else jax.lax.slice_in_dim(leaf, 0, size, axis=axis)
            for leaf, axis in zip(leaves, self.axes)
        ]

    def _check_rows(self, size: int, outputs: list[Any]) -> None:
        wrong = [f"  {p}: {tuple(k.shape)}" for p, k in zip(self._paths, outputs) if k.shape[:1] != (size,)]
        if wrong:
            raise ValueError(
                f"Outputs must have a row for each row of the micro-batch, {size} here, in their first axis. "
                "Received:\n" + "\n".join(wrong) + f"\n{_OUTSIDE}"
            )


_OUTSIDE = "Return what each row gives, and reduce over the rows outside of the chunked function."


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))
