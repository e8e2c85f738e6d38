"""Chunk the model: any loss on all outputs, in the memory of a few rows.

The first of two passes runs forward without residuals; backward runs each micro-batch again and adds up.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.jax.batch import (
    Batch,
    Group,
    argument_names,
    argument_numbers,
    as_varying,
    axes_of_each,
    drawn_shapes,
    like,
    over,
    varying_axes,
    zeros,
)
from gradaccum.on_jax import recomputed
from gradaccum.schedule import checked_count


def chunked(
    fn: Callable[..., Any],
    micro_batch_size: int,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    in_axes: Any = 0,
    keep: int = 0,
    rng_argnum: int | None = None,
) -> Callable[..., Any]:
    """`fn` over micro-batches: the whole batch's outputs and gradients, for any loss, in the memory of a few rows.

    The first pass runs `fn` over micro-batches and keeps only the outputs; the loss sees all of them; backward runs
    each micro-batch again and adds up  `dL/dp = sum_i (dL/d out_i) (d out_i/dp)`.  It goes inside your own `jax.jit`,
    `jax.grad` and `shard_map`. `jax.grad` of `jax.grad` is exact too; forward mode (`jax.jvp`) raises JAX' error about
    `custom_vjp`.

    A row's output must depend only on that row and on shared arguments. Arguments, and values that `fn` closes over,
    are pytrees; leaves that are no arrays (functions, strings, Python's numbers) stay as they are. All inputs that need
    a gradient get one.

    Args:
        fn: `fn(params, batch)` returns arrays with a row for each row in their first axis, in any pytree. All
            micro-batches share its keyword arguments.
        micro_batch_size: Rows that one forward and backward pass may hold.
        batch_argnums: Which arguments are cut into micro-batches.
        in_axes: The axis of their rows, as for `jax.vmap`: an int, or a pytree prefix of the batch (one for each, where
            `batch_argnums` is a tuple). None marks arguments that every micro-batch needs whole.
        keep: Micro-batches that keep their activations and aren't run again, which saves time for memory.
        rng_argnum: An argument that is a key, or a pytree of keys: each of n micro-batches gets one of
            `jax.random.split(key, n)`, the same in both passes. A batch that is a single micro-batch gets the key
            itself. (With a key for each row, as a part of the batch, random numbers don't depend on the size.)

    Raises:
        TypeError, ValueError: An option or the batch isn't as described; an output has no row for each row; `fn` draws
            random numbers for its rows from a key that all micro-batches share. Raised while tracing, with the name.

    Example:
        >>> import jax.numpy as jnp
        >>> encode = chunked(lambda params, x: jnp.tanh(x @ params), 16)
        >>> def loss_fn(params, x, y):                     # every row against every other
        ...     logits = encode(params["x"], x) @ encode(params["y"], y).T
        ...     return -jnp.diag(jax.nn.log_softmax(logits)).mean()
        >>> params = {"x": jnp.ones((3, 2)), "y": jnp.eye(3, 2)}
        >>> loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, jnp.ones((100, 3)), jnp.ones((100, 3)))
        >>> grads["x"].shape
        (3, 2)
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function. Received: fn={fn!r} of type {type(fn).__name__}.")
    checked_count(micro_batch_size, "micro_batch_size")
    checked_count(keep, "keep", least=0)
    batches = argument_numbers("batch_argnums", batch_argnums)
    keys = () if rng_argnum is None else argument_numbers("rng_argnum", rng_argnum)
    if set(batches) & set(keys):
        raise ValueError(f"Argument {rng_argnum} of fn can't be in both `batch_argnums` and `rng_argnum`.")
    axes = axes_of_each(in_axes, batch_argnums)

    @functools.wraps(fn)
    def in_chunks(*args: Any, **kwargs: Any) -> Any:
        for name, number in [*(("batch_argnums", n) for n in batches), *(("rng_argnum", n) for n in keys)]:
            if number >= len(args):
                raise TypeError(
                    f"`{name}` names argument {number}, but there are {len(args)} positional ones (the first is 0). "
                    "Pass it by position, or give another number."
                )
        batch = Batch(tuple(args[n] for n in batches), axes, argument_names(fn, batches))
        groups = batch.groups(micro_batch_size)
        count = sum(group.count for group in groups)
        body = Body(fn, args, kwargs, batches, keys, batch)
        if count == 1:
            body.check(groups)
            return fn(*args, **kwargs)
        split = [jax.random.split(key, count) for key in body.keys]
        return in_two_passes(body, groups, keep, split)

    return in_chunks


class _Traced(NamedTuple):
    """`fn` on micro-batches of one size."""

    jaxpr: Any
    consts: list[Any]
    outputs: list[Any]


class Body:
    """`fn` with the arrays of a call taken out.

    Attributes:
        shared: Arrays that all micro-batches share.
        rows: The arrays with rows, and `axes` the axis of each one's.
        keys: Of the argument that is a key.
        structure: Of the outputs, once it is traced.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, batches: Any, key_numbers: Any, batch: Batch
    ) -> None:
        self.fn, self.batch = fn, batch
        leaves, axes, self._arguments = batch.with_others(args, kwargs, batches)
        self._leaves = leaves
        numbers = dict(enumerate(n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)))
        rows = [n for n, axis in enumerate(axes) if axis is not None]
        keys = [n for n in range(len(leaves)) if numbers.get(n) in key_numbers]
        others = [n for n, leaf in enumerate(leaves) if _is_array(leaf) and n not in (*rows, *keys)]
        self._positions = [*others, *rows, *keys]
        # In an enclosing `shard_map`: else each micro-batch's gradients would be summed over the devices.
        varying = varying_axes([leaves[n] for n in rows])
        self.shared = [as_varying(jnp.asarray(leaves[n]), varying) for n in others]
        self.rows, self.axes = [jnp.asarray(leaves[n]) for n in rows], [axes[n] or 0 for n in rows]
        self.keys = [leaves[n] for n in keys]
        self.structure: Any = None
        self._paths: list[str] = []
        self._traced: dict[int, _Traced] = {}

    def __call__(self, shared: list[Any], rows: list[Any], keys: list[Any]) -> list[Any]:
        """The outputs for one micro-batch, flat."""
        leaves = _filled(self._leaves, self._positions, [*shared, *rows, *keys])
        args, kwargs = jax.tree.unflatten(self._arguments, leaves)
        found, self.structure = jax.tree_util.tree_flatten_with_path(self.fn(*args, **kwargs))
        self._paths = [f"outputs{jax.tree_util.keystr(path)}" for path, _ in found]
        return [jnp.asarray(leaf) for _, leaf in found]

    def traced(self, size: int) -> _Traced:
        """`fn` on micro-batches of so many rows."""
        if size not in self._traced:
            cut = [
                jax.eval_shape(lambda leaf, axis=axis: jax.lax.slice_in_dim(leaf, 0, size, axis=axis), leaf)
                for leaf, axis in zip(self.rows, self.axes)
            ]
            closed, outputs = jax.make_jaxpr(self, return_shape=True)(self.shared, cut, self.keys)
            self._traced[size] = _Traced(closed.jaxpr, list(closed.consts), list(outputs))
        return self._traced[size]

    def check(self, groups: list[Group]) -> None:
        """Outputs have a row for each row, at two sizes, and keys that all share draw nothing for rows."""
        sizes = {group.size: self.traced(group.size) for group in groups}
        for size, traced in sizes.items():
            self._check_rows(size, traced.outputs)
        if len(sizes) == 1:
            (size,) = sizes
            other = size - 1 if size > 1 else 2
            with contextlib.suppress(Exception):  # a function that is written for one size
                sizes[other] = self.traced(other)
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
                "The function draws random numbers for its rows from a key that all micro-batches share, so all of "
                "them would draw the same numbers. Name the key's argument with rng_argnum=..., so that each "
                "micro-batch gets a key of its own, or put a key for each row into the batch."
            )

    def _check_rows(self, size: int, outputs: list[Any]) -> None:
        wrong = [f"  {p}: {tuple(k.shape)}" for p, k in zip(self._paths, outputs) if k.shape[:1] != (size,)]
        if wrong:
            raise ValueError(
                f"Outputs must have a row for each row of the micro-batch, {size} here, in their first axis. "
                "Received:\n" + "\n".join(wrong) + f"\n{_OUTSIDE}"
            )


_OUTSIDE = "Return an output for each row, and reduce over the rows outside the chunked function."


def in_two_passes(body: Body, groups: list[Group], keep: int, keys: list[Any]) -> Any:
    """The outputs of the whole batch; `keys` has one for each micro-batch.

    The first `keep` micro-batches are plain JAX, which keeps their activations.
    """
    body.check(groups)
    batch, outputs, done = body.batch, [], 0
    for group in groups:
        kept = max(0, min(group.count, keep - done))
        start = group.start + kept * (group.size // batch.blocks)
        for some, is_kept in (
            (Group(group.start, group.size, kept), True),
            (Group(start, group.size, group.count - kept), False),
        ):
            if some.count:
                part = _Part(body.traced(group.size), some)
                rows = [batch.stacked(leaf, axis, some) for leaf, axis in zip(body.rows, body.axes)]
                mine = [key[done : done + some.count] for key in keys]
                done += some.count
                fixed = [*part.traced.consts, *body.shared]
                outputs.append(part.kept(fixed, rows, mine) if is_kept else part.replayed(fixed, rows, mine))
    return jax.tree.unflatten(body.structure, [batch.joined(list(pieces)) for pieces in zip(*outputs, strict=True)])


class _Part(NamedTuple):
    """Micro-batches of one size that are treated alike.

    `fixed` is what they share, and what the function closes over; `rows` has theirs, and `keys` one for each.
    """

    traced: _Traced
    group: Group

    def outputs(self, fixed: list[Any], rows: list[Any], keys: list[Any]) -> list[Any]:
        """What each gives, stacked."""
        return over([self.group], lambda _, group, index, x: (None, self._of_one(fixed, *x)), None, (rows, keys))[1][0]

    def _of_one(self, fixed: list[Any], rows: list[Any], keys: list[Any]) -> list[Any]:
        consts, shared = fixed[: len(self.traced.consts)], fixed[len(self.traced.consts) :]
        return jax.core.eval_jaxpr(self.traced.jaxpr, consts, *shared, *rows, *keys)

    def kept(self, fixed: list[Any], rows: list[Any], keys: list[Any]) -> list[Any]:
        """The outputs, as JAX differentiates them; gradients of half precision are added up in float32."""
        wide = [_widened(value) for value in fixed]

        def one(_: Any, group: Group, index: Any, x: Any) -> Any:
            return None, self._of_one([value.astype(old.dtype) for value, old in zip(wide, fixed)], *x)

        return over([self.group], one, None, (rows, keys))[1][0]

    def replayed(self, fixed: list[Any], rows: list[Any], keys: list[Any]) -> list[Any]:
        """The outputs, whose gradients run each micro-batch again."""
        count = len(fixed)

        def first(inputs: list[Any], keys: list[Any]) -> tuple[list[Any], None]:
            return self.outputs(inputs[:count], inputs[count:], keys), None

        def second(inputs: list[Any], keys: list[Any], upstream: list[Any], wanted: tuple[int, ...]) -> list[Any]:
            return self._gradients(inputs[:count], inputs[count:], keys, upstream, wanted)

        return recomputed(first, second)([*fixed, *rows], keys)[0]

    def _gradients(
        self, fixed: list[Any], rows: list[Any], keys: list[Any], upstream: list[Any], wanted: tuple[int, ...]
    ) -> list[Any]:
        used = [n for n, given in enumerate(upstream) if given is not None]
        of_fixed = [n for n in wanted if n < len(fixed)]

        def step(sums: list[Any], group: Group, index: Any, x: Any) -> Any:
            mine, key, given = x

            def outputs(*some: Any) -> list[Any]:
                values = _filled([*fixed, *mine], wanted, some)
                found = self._of_one(values[: len(fixed)], values[len(fixed) :], key)
                return [found[n] for n in used]

            values = [*fixed, *mine]
            found = jax.vjp(outputs, *(values[n] for n in wanted))[1](given)
            added = [like(fixed[n], s + _widened(g)) for n, s, g in zip(of_fixed, sums, found)]
            return added, list(found[len(of_fixed) :])

        begin = [_zeros(fixed[n]) for n in of_fixed]
        sums, (entries,) = over([self.group], step, begin, (rows, keys, [upstream[n] for n in used]))
        gradients = _filled([None] * (len(fixed) + len(rows)), wanted, [*sums, *entries])
        return [g if g is None else g.astype(x.dtype) for g, x in zip(gradients, [*fixed, *rows])]


def _filled(values: list[Any], positions: Any, others: Any) -> list[Any]:
    """The values, with others at these positions."""
    replaced = dict(zip(positions, others))
    return [replaced.get(n, value) for n, value in enumerate(values)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _widened(number: Any) -> Any:
    """Half precision in float32: sums of many lose what they add otherwise."""
    half = jnp.issubdtype(number.dtype, jnp.floating) and jnp.finfo(number.dtype).bits < 32
    return number.astype(jnp.float32) if half else number


def _zeros(leaf: Any) -> Any:
    kind = jax.typeof(leaf)
    return like(leaf, zeros(kind, _widened(zeros(jax.ShapeDtypeStruct((), kind.dtype))).dtype))
