"""The two passes: forward without residuals, and backward that runs each micro-batch again and adds up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from gradaccum.jax.batch import Batch, Group, as_varying, drawn_shapes, like, varying_axes, zeros
from gradaccum.on_jax import scan

__all__ = ["Body", "TwoPasses"]


class _Traced(NamedTuple):
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
        self._traced: dict[int, _Traced] = {}

    def __call__(self, shared: list[Any], micro_batch: list[Any], keys: list[Any]) -> list[Any]:
        """The outputs for one micro-batch, flat."""
        leaves = iter(shared)
        filled = [next(leaves) if dynamic else static for dynamic, static in zip(self._dynamic, self._static)]
        others, kwargs = jax.tree.unflatten(self._others, filled)
        parts = dict(zip(self.batches, jax.tree.unflatten(self.batch.structure, self.leaves_with(micro_batch))))
        parts |= dict(zip(self.key_numbers, jax.tree.unflatten(self._keys, keys)))
        remaining = iter(others)
        outputs = self.fn(*(parts[n] if n in parts else next(remaining) for n in range(self.count)), **kwargs)
        found, self.structure = jax.tree_util.tree_flatten_with_path(outputs)
        self._paths = [f"outputs{jax.tree_util.keystr(path)}" for path, _ in found]
        return [jnp.asarray(leaf) for _, leaf in found]

    def leaves_with(self, arrays: list[Any]) -> list[Any]:
        """The batch's leaves, with these arrays."""
        replaced = dict(zip(self.rows, arrays))
        return [replaced.get(position, leaf) for position, leaf in enumerate(self.batch.leaves)]

    def traced(self, group: Group) -> _Traced:
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

    def _trace(self, micro_batch: list[Any]) -> _Traced:
        closed, outputs = jax.make_jaxpr(self, return_shape=True)(self.shared, micro_batch, self.keys)
        return _Traced(closed.jaxpr, list(closed.consts), list(outputs))

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


class _Part(NamedTuple):
    """Micro-batches of one size that are treated alike."""

    group: Group
    first: int
    kept: bool
    traced: _Traced
    consts: list[int]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which inputs need a gradient, by position: known when the first pass is traced, and needed in the second."""

    positions: tuple[int, ...]


class TwoPasses:
    """A call of a chunked function.

    Its inputs, flat: what the function closes over, what the arguments share, and the arrays of the batch.
    """

    def __init__(self, body: Body, batch: Batch, groups: list[Group], keep: int) -> None:
        self.body, self.batch = body, batch
        body.check(groups)
        self.consts: list[Any] = []
        self.parts: list[_Part] = []
        first = 0
        for group in groups:
            traced = body.traced(group)
            new = {id(const): const for const in (*self.consts, *traced.consts)}
            self.consts, places = [*new.values()], [*new]
            consts = [places.index(id(const)) for const in traced.consts]
            kept = max(0, min(group.count, keep - first))
            start = group.start + kept * (group.size // batch.blocks)
            behind = Group(start, group.size, group.count - kept)
            for some, is_kept in ((Group(group.start, group.size, kept), True), (behind, False)):
                if some.count:
                    self.parts.append(_Part(some, first, is_kept, traced, consts))
                    first += some.count
        self.axes: list[int | None] = [*[None] * (len(self.consts) + len(body.shared)), *body.axes]
        """Of each input, the axis of its rows; None for what is shared."""

    def __call__(self, keys: list[Any]) -> Any:
        """The outputs of the whole batch; `keys` has one for each micro-batch."""
        run = jax.custom_vjp(self._outputs)
        run.defvjp(self._first_pass, self._second_pass, symbolic_zeros=True)
        inputs = [*self.consts, *self.body.shared, *(self.batch.leaves[i] for i in self.body.rows)]
        return jax.tree.unflatten(self.body.structure, run(inputs, keys))

    # The first pass.

    def _outputs(self, inputs: list[Any], keys: list[Any]) -> list[Any]:
        return self._joined([self._forward(part, inputs, keys) for part in self.parts])

    def _forward(self, part: _Part, inputs: list[Any], keys: list[Any]) -> list[Any]:
        return self._over(part, keys, lambda index, key: self._evaluated(part, self._values(part, inputs, index), key))

    def _first_pass(self, inputs: Any, keys: Any) -> Any:
        wanted = _Wanted(tuple(n for n, each in enumerate(inputs) if each.perturbed and _is_inexact(each.value)))
        inputs, keys = [each.value for each in inputs], [each.value for each in keys]
        outputs, pullbacks = [], []
        for part in self.parts:
            if part.kept:
                some, pullback = self._kept(part, inputs, keys, wanted.positions)
                pullbacks.append(pullback)
            else:
                some = self._forward(part, inputs, keys)
            outputs.append(some)
        return self._joined(outputs), (inputs, keys, pullbacks, wanted)

    def _kept(self, part: _Part, inputs: list[Any], keys: list[Any], wanted: tuple[int, ...]) -> Any:
        """Outputs and pullback of micro-batches whose activations stay."""
        rows = self._over(part, [], lambda index, key: self._values(part, inputs, index))

        def outputs(given: list[Any]) -> list[Any]:
            replaced = dict(zip(wanted, given))

            def one(index: Any, key: Any, entries: Any) -> list[Any]:
                values = [
                    entry if axis is not None else replaced.get(n, value).astype(value.dtype)
                    for n, (value, axis, entry) in enumerate(zip(inputs, self.axes, entries))
                ]
                return self._evaluated(part, values, key)

            xs = [replaced.get(n, rows[n]) if axis is not None else None for n, axis in enumerate(self.axes)]
            return self._over(part, keys, one, xs)

        given = [rows[n] if self.axes[n] is not None else _widened(inputs[n]) for n in wanted]
        return jax.vjp(outputs, given)

    # The second pass.

    def _second_pass(self, kept: Any, cotangents: Any) -> Any:
        inputs, keys, pullbacks, wanted = kept
        used = [n for n, each in enumerate(cotangents) if not isinstance(each, SymbolicZero) and _is_inexact(each)]
        sums = [None if self.axes[n] is not None else self._zeros(inputs[n]) for n in wanted.positions]
        rows: list[list[Any]] = [[] for _ in wanted.positions]
        waiting = iter(pullbacks)
        for part in self.parts:
            if part.kept:
                found = self._pulled_back(part, next(waiting), cotangents, used)
                sums = [s if s is None else s + g for s, g in zip(sums, found)]
            else:
                sums, found = self._replayed(part, inputs, keys, cotangents, used, wanted.positions, sums)
            for entries, entry, number in zip(rows, found, wanted.positions):
                if self.axes[number] is not None:
                    entries.append(entry)
        gradients: list[Any] = [None] * len(inputs)
        for number, total, entries in zip(wanted.positions, sums, rows):
            axis = self.axes[number]
            gradient: Any = total if axis is None else self.batch.joined(entries, axis)
            gradients[number] = gradient.astype(inputs[number].dtype)
        return gradients, None

    def _replayed(
        self, part: _Part, inputs: Any, keys: Any, cotangents: Any, used: Any, wanted: Any, sums: Any
    ) -> tuple[list[Any], list[Any]]:
        """The sums with these micro-batches' gradients in them, and the gradients of their rows."""

        def gradients(index: Any, key: Any) -> list[Any]:
            values = self._values(part, inputs, index)

            def outputs(*given: Any) -> list[Any]:
                filled = list(values)
                for number, value in zip(wanted, given):
                    filled[number] = value
                found = self._evaluated(part, filled, key)
                return [found[n] for n in used]

            _, pullback = jax.vjp(outputs, *(values[n] for n in wanted))
            return list(pullback(self._cotangents_of(part, index, cotangents, used)))

        def step(sums: list[Any], x: Any) -> Any:
            found = gradients(*x)
            added = [s if s is None else like(inputs[n], s + _widened(g)) for s, g, n in zip(sums, found, wanted)]
            return added, [g if s is None else None for s, g in zip(sums, found)]

        return self._scan(part, keys, step, sums)

    def _pulled_back(self, part: _Part, pullback: Any, cotangents: Any, used: Any) -> list[Any]:
        kinds = part.traced.outputs
        stacked = iter(self._over(part, [], lambda index, key: self._cotangents_of(part, index, cotangents, used)))
        whole = []
        for n, kind in enumerate(kinds):
            none = kind.dtype if jnp.issubdtype(kind.dtype, jnp.inexact) else jax.dtypes.float0
            whole.append(next(stacked) if n in used else jnp.zeros((part.group.count, *kind.shape), none))
        return list(pullback(whole)[0])

    def _cotangents_of(self, part: _Part, index: Any, cotangents: Any, used: Any) -> list[Any]:
        leaves = [cotangents[n] for n in used]
        return list(self.batch.with_leaves(leaves, [0] * len(leaves)).micro_batch(part.group, index))

    # What both share.

    def _values(self, part: _Part, inputs: list[Any], index: Any) -> list[Any]:
        """The inputs, with the rows of one micro-batch."""
        shared = len(inputs) - len(self.body.rows)
        leaves = self.body.leaves_with(inputs[shared:])
        return [*inputs[:shared], *self.body.micro_batch(leaves, part.group, index)]

    def _evaluated(self, part: _Part, values: list[Any], key: list[Any]) -> list[Any]:
        count = len(self.consts)
        consts = [values[n] for n in part.consts]
        return jax.core.eval_jaxpr(part.traced.jaxpr, consts, *values[count:], *key)

    def _over(self, part: _Part, keys: list[Any], one: Callable[..., list[Any]], entries: Any = None) -> list[Any]:
        """What `one(index, key)` gives for each micro-batch, stacked; `entries` holds more for each of them."""

        def step(carry: Any, x: Any) -> Any:
            index, key, *more = x
            return carry, one(index, key, *more)

        return self._scan(part, keys, step, None, *(() if entries is None else (entries,)))[1]

    def _scan(self, part: _Part, keys: list[Any], step: Callable[..., Any], carry: Any, *more: Any) -> Any:
        count = part.group.count
        keys = [key[part.first : part.first + count] for key in keys]
        if count == 1:
            carry, found = step(carry, (0, *jax.tree.map(lambda each: each[0], (keys, *more))))
            return carry, jax.tree.map(lambda each: each[None], found)
        return scan(step, carry, (jnp.arange(count), keys, *more))

    def _joined(self, parts: list[list[Any]]) -> list[Any]:
        return [self.batch.joined(list(pieces)) for pieces in zip(*parts, strict=True)]

    def _zeros(self, leaf: Any) -> Any:
        kind = jax.typeof(leaf)
        return like(leaf, zeros(kind, _widened(zeros(jax.ShapeDtypeStruct((), kind.dtype))).dtype))


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _widened(number: Any) -> Any:
    """Half precision in float32: sums of many lose what they add otherwise."""
    half = jnp.issubdtype(number.dtype, jnp.floating) and jnp.finfo(number.dtype).bits < 32
    return number.astype(jnp.float32) if half else number
