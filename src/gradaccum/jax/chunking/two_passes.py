"""The two passes: forward without residuals, and backward that runs each micro-batch again and adds up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from gradaccum.jax.batch import Batch, Group, like, zeros
from gradaccum.jax.chunking.body import Body, Traced
from gradaccum.on_jax import scan

__all__ = ["TwoPasses"]


class _Part(NamedTuple):
    """Micro-batches of one size that are treated alike."""

    group: Group
    first: int
    kept: bool
    traced: Traced
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
            consts = [self._position(const) for const in traced.consts]
            kept = max(0, min(group.count, keep - first))
            for some, is_kept in ((Group(group.start, group.size, kept), True), (_behind(group, kept, batch), False)):
                if some.count:
                    self.parts.append(_Part(some, first, is_kept, traced, consts))
                    first += some.count
        self.axes: list[int | None] = [*[None] * (len(self.consts) + len(body.shared)), *body.axes]
        """Of each input, the axis of its rows; None for what is shared."""

    def _position(self, const: Any) -> int:
        for position, known in enumerate(self.consts):
            if known is const:
                return position
        self.consts.append(const)
        return len(self.consts) - 1

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
        whole = [
            next(stacked) if n in used else _no_cotangent((part.group.count, *kind.shape), kind.dtype)
            for n, kind in enumerate(kinds)
        ]
        return list(pullback(whole)[0])

    def _cotangents_of(self, part: _Part, index: Any, cotangents: Any, used: Any) -> list[Any]:
        leaves = [cotangents[n] for n in used]
        return list(self.batch.with_leaves(leaves, [0] * len(leaves)).micro_batch(part.group, index))

    # What both share.

    def _values(self, part: _Part, inputs: list[Any], index: Any) -> list[Any]:
        """The inputs, with the rows of one micro-batch."""
        shared = len(inputs) - len(self.body.rows)
        leaves = list(self.batch.leaves)
        for position, leaf in zip(self.body.rows, inputs[shared:]):
            leaves[position] = leaf
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


def _behind(group: Group, count: int, batch: Batch) -> Group:
    """The group without its first micro-batches."""
    return Group(group.start + count * (group.size // batch.blocks), group.size, group.count - count)


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _widened(number: Any) -> Any:
    """Half precision in float32: sums of many lose what they add otherwise."""
    half = jnp.issubdtype(number.dtype, jnp.floating) and jnp.finfo(number.dtype).bits < 32
    return number.astype(jnp.float32) if half else number


def _no_cotangent(shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    return jnp.zeros(shape, jax.dtypes.float0)
