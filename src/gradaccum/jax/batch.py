"""Where the rows of a batch are, which of them make a micro-batch, and what is asked of arrays and traced functions."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType

from gradaccum.on_jax import scan

NEED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What a function raises that asks for values where it is traced."""


@dataclass(frozen=True)
class Group:
    """Micro-batches of one size, one behind the other."""

    start: int
    """The first row, within each block."""
    size: int
    """Rows of a micro-batch, all blocks together."""
    count: int
    """Micro-batches."""


class Batch:
    """The batch arguments of a call.

    Micro-batches are as even as they can be, so there are at most two sizes. Their rows follow each other in the batch.
    Only where the batch is spread over several devices, each micro-batch takes its rows from all of them: the batch is
    seen as `blocks` parts of equal length, and a micro-batch has the same rows of each part.

    Example:
        >>> batch = Batch((jnp.arange(5),), (0,), ("batch",))
        >>> batch.rows, batch.groups(2)
        (5, [Group(start=0, size=2, count=2), Group(start=4, size=1, count=1)])
        >>> batch.micro_batch(Group(0, 2, 2), 1)
        (Array([2, 3], dtype=...),)
    """

    def __init__(self, arguments: tuple[Any, ...], in_axes: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self.leaves: list[Any] = []
        self.axes: list[int | None] = []
        """The axis of each leaf's rows; None for what is shared."""
        self.paths: list[str] = []
        """What messages call each leaf."""
        self._ends = [0]
        for argument, prefix, name in zip(arguments, in_axes, names, strict=True):
            found, _ = jax.tree_util.tree_flatten_with_path(argument)
            self.leaves += [leaf for _, leaf in found]
            self.paths += [name + jax.tree_util.keystr(path) for path, _ in found]
            for axis in jax.tree.leaves(prefix, is_leaf=lambda node: node is None):
                if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
                    raise TypeError(
                        f"`in_axes` must hold ints and None, as for jax.vmap. Received: in_axes={prefix!r}."
                    )
            self.axes += spread(prefix, argument, "in_axes", name)
            self._ends.append(len(self.leaves))
        self.structure = jax.tree.structure(arguments)
        self.rows = self._counted()
        """Rows of the whole batch."""
        leaves = self.leaves
        self.devices = math.lcm(*(devices_of(leaf) for leaf, axis in zip(leaves, self.axes) if axis is not None))
        """Devices that the batch may be spread over."""
        self.blocks = 1
        """Parts of the batch that each micro-batch has rows of."""

    def _counted(self) -> int:
        lengths, paths = set(), self.paths
        for position, (leaf, axis) in enumerate(zip(self.leaves, self.axes)):
            if axis is None:
                continue
            try:
                shape = jax.typeof(leaf).shape
            except TypeError:
                raise TypeError(
                    f"{paths[position]} is not an array, so it has no rows. Received: {leaf!r}. Mark it with None in "
                    "`in_axes` if every micro-batch needs it whole."
                ) from None
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{paths[position]} has no axis {axis} for its rows: its shape is {shape}. Give the axis of its "
                    "rows in `in_axes`, or None if every micro-batch needs it whole."
                )
            self.axes[position] = axis % len(shape)
            lengths.add(shape[axis])
        if not lengths:
            raise ValueError("The batch has no leaf with rows. Check `batch_argnums` and `in_axes`.")
        if len(lengths) > 1:
            lines = [
                f"  {path}: {jnp.shape(leaf)[axis]} rows in axis {axis} of {jnp.shape(leaf)}"
                for path, leaf, axis in zip(paths, self.leaves, self.axes)
                if axis is not None
            ]
            raise ValueError(
                "The leaves of the batch have different numbers of rows:\n"
                + "\n".join(lines)
                + "\nGive the axis of the rows of each in `in_axes`, None for what every micro-batch needs whole."
            )
        (rows,) = lengths
        if rows == 0:
            raise ValueError("The batch is empty: it has 0 rows.")
        return rows

    def axes_of(self, position: int) -> list[int | None]:
        """The axis of each leaf of one of the arguments."""
        return self.axes[self._ends[position] : self._ends[position + 1]]

    def with_others(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[int]
    ) -> tuple[list[Any], list[int | None], Any]:
        """The leaves of a call whose batch these arguments are, the axis of each one's rows, and their structure."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        axes: list[int | None] = []
        for number, argument in enumerate(args):
            in_batch = number in numbers
            axes += self.axes_of(numbers.index(number)) if in_batch else [None] * len(jax.tree.leaves(argument))
        return leaves, axes + [None] * (len(leaves) - len(axes)), structure

    def groups(self, micro_batch_size: int) -> list[Group]:
        """The micro-batches, of at most this many rows; sets the `blocks` that they are taken from."""
        most = min(micro_batch_size, self.rows)
        common = math.gcd(self.devices, self.rows)
        self.blocks = max(d for d in range(1, min(most, common) + 1) if common % d == 0)
        rows, most = self.rows // self.blocks, most // self.blocks
        count = -(-rows // most)
        size, larger = divmod(rows, count)  # as `gradaccum.core.sizes.even_sizes` cuts rows
        groups = [Group(0, (size + 1) * self.blocks, larger)] if larger else []
        groups.append(Group(larger * (size + 1), size * self.blocks, count - larger))
        return groups

    def micro_batch(self, group: Group, index: Any) -> tuple[Any, ...]:
        """The arguments with the rows of one micro-batch; `index` may be traced."""
        size = group.size // self.blocks
        start = group.start + index * size

        def rows_of(leaf: Any, axis: int | None) -> Any:
            if axis is None or group.size == self.rows:
                return leaf
            leaf = jnp.asarray(leaf)
            if self.blocks == 1:
                return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)
            before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
            parts = leaf.reshape(*before, self.blocks, self.rows // self.blocks, *after)
            parts = jax.lax.dynamic_slice_in_dim(parts, start, size, axis + 1)
            return parts.reshape(*before, group.size, *after)

        return jax.tree.unflatten(self.structure, [rows_of(*pair) for pair in zip(self.leaves, self.axes)])

    def stacked(self, leaf: Any, axis: int, group: Group) -> Any:
        """The rows of the micro-batches of a group, one micro-batch behind the other in a new first axis."""
        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
        size, count = group.size // self.blocks, group.count
        parts = leaf.reshape(*before, self.blocks, self.rows // self.blocks, *after)
        parts = jax.lax.slice_in_dim(parts, group.start, group.start + count * size, axis=axis + 1)
        parts = jnp.moveaxis(parts.reshape(*before, self.blocks, count, size, *after), axis + 1, 0)
        return parts.reshape(count, *before, group.size, *after)

    def joined(self, parts: list[Any], axis: int = 0) -> Any:
        """The rows of all micro-batches, in the order of the batch."""
        pieces = []
        for part in parts:
            count, shape = part.shape[0], part.shape[1:]
            before, size, after = shape[:axis], shape[axis] // self.blocks, shape[axis + 1 :]
            part = part.reshape(count, *before, self.blocks, size, *after)
            part = jnp.moveaxis(part, 0, axis + 1)
            pieces.append(part.reshape(*before, self.blocks, count * size, *after))
        whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis + 1)
        return whole.reshape(*whole.shape[:axis], self.rows, *whole.shape[axis + 2 :])


def over(
    groups: Iterable[Group],
    step: Callable[[Any, Group, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    enter: Callable[[Any, Group], Any] = lambda carry, group: carry,
) -> tuple[Any, list[Any]]:
    """The carry after `step(carry, group, index, x)` of every micro-batch, and of each group what they gave, stacked.

    The micro-batches of a group run in a scan; one alone runs by itself. `xs` has an entry for each micro-batch.
    `enter(carry, group)` gives the carry that a group begins with.
    """
    done, parts = 0, []
    for group in groups:
        some = jax.tree.map(lambda each: each[done : done + group.count], xs)  # noqa: B023  # used at once
        done += group.count
        carry = enter(carry, group)
        if group.count == 1:
            carry, part = step(carry, group, 0, jax.tree.map(lambda each: each[0], some))
            part = jax.tree.map(lambda each: jnp.asarray(each)[None], part)
        else:

            def body(state: Any, x: Any, group: Group = group) -> Any:
                carry, part = step(state[1], group, state[0], x)
                return (state[0] + 1, carry), part

            # Counted in the carry: as `xs`, the numbers would be an array that grows with the micro-batches.
            (_, carry), part = scan(body, (jnp.zeros((), jnp.int32), carry), some, length=group.count)
        parts.append(part)
    return carry, parts


def spread(prefix: Any, tree: Any, option: str, name: str) -> list[Any]:
    """For each leaf of the tree, what a pytree prefix of it says.

    Example:
        >>> spread({"x": 0, "y": None}, {"x": (1.0, 2.0), "y": 3.0}, "in_axes", "batch")
        [0, 0, None]
    """
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda value, part: found.extend([value] * len(jax.tree.leaves(part))),
            prefix,
            tree,
            is_leaf=lambda node: node is None,
        )
    except ValueError as error:
        hint = ""
        if option == "in_axes" and isinstance(prefix, tuple) and len(prefix) == 1 and not isinstance(tree, tuple):
            hint = (
                f" For one batch argument it is that argument's own, without a tuple around it: in_axes={prefix[0]!r}."
            )
        raise TypeError(f"`{option}` is not a pytree prefix of {name}: {option}={prefix!r}.{hint} {error}") from None
    return found


def argument_numbers(name: str, given: Any, *, from_end: bool = False) -> tuple[int, ...]:
    """An argument's number, or those of several, as a tuple.

    Example:
        >>> argument_numbers("argnums", 1), argument_numbers("argnums", (0, 2))
        ((1,), (0, 2))
    """
    several = name.endswith("argnums")
    numbers = given if several and isinstance(given, tuple | list) else (given,)
    one = "an int" if from_end else "an int >= 0"
    kind = f"{one}, or a tuple of such ints" if several else f"{one}, or None"
    if not numbers or any(isinstance(number, bool) for number in numbers):
        raise TypeError(f"`{name}` must be {kind}. Received: {name}={given!r}.")
    try:
        found = tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise TypeError(f"`{name}` must be {kind}. Received: {name}={given!r}.") from None
    if (min(found) < 0 and not from_end) or len(set(found)) < len(found):
        raise ValueError(f"`{name}` must be {kind}, each once. Received: {name}={given!r}.")
    return found


def argument_names(fn: Any, numbers: Iterable[int]) -> tuple[str, ...]:
    """What messages call these arguments: by their names, where they have one."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[n] if n < len(names) else f"args[{n}]" for n in numbers)


def axes_of_each(in_axes: Any, batch_argnums: Any) -> tuple[Any, ...]:
    """`in_axes` for each batch argument.

    Example:
        >>> axes_of_each(0, (1, 2)), axes_of_each((0, None), 1), axes_of_each((0, None), (1, 2))
        ((0, 0), ((0, None),), (0, None))
    """
    if not isinstance(batch_argnums, tuple | list):
        return (in_axes,)
    if isinstance(in_axes, tuple | list):
        if len(in_axes) != len(batch_argnums):
            raise ValueError(
                "`in_axes` must be one for all, or one for each of `batch_argnums`. Received: "
                f"in_axes={in_axes!r}, batch_argnums={batch_argnums}."
            )
        return tuple(in_axes)
    return (in_axes,) * len(batch_argnums)


def varying_axes(tree: Any) -> frozenset[str]:
    """The axes of an enclosing `shard_map` that some leaf has other values along; none outside of one."""
    found: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        is_type = hasattr(leaf, "manual_axis_type") or hasattr(leaf, "vma")
        kind = leaf if is_type else jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)  # JAX before 0.10: `vma`
        found |= frozenset(getattr(kind, "vma", ()) or () if manual is None else manual.varying)
    return found


def as_varying(tree: Any, axes: Iterable[str]) -> Any:
    """The same values, of a type that varies over these axes, too."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def _mesh(leaf: Any) -> Any:
    """The abstract mesh that this array lives on, as far as its type tells."""
    return getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)


def devices_of(leaf: Any) -> int:
    """How many devices this array may be spread over, without those of an enclosing `shard_map`, which has cut it."""
    mesh = _mesh(leaf)
    if mesh is None or mesh.empty:
        return 1
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return math.prod(mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual)


def like(leaf: Any, value: Any) -> Any:
    """`value`, a gradient, on the devices that hold the parameter `leaf`.

    With axes of type Explicit the types see to that. With Auto the compiler chooses, and may keep all of a sum on every
    device though each holds but a part of the parameter.
    """
    if devices_of(leaf) == 1 or AxisType.Auto not in _mesh(leaf).axis_types:
        return value
    return shard_alike(leaf, value)[1]


def zeros(kind: Any, dtype: Any = None) -> Any:
    """Zeros of the shape and devices of `kind`, a type or what `jax.eval_shape` gives."""
    made = jnp.zeros(kind.shape, kind.dtype if dtype is None else dtype)
    mesh = getattr(getattr(kind, "sharding", None), "mesh", None)
    if mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types:
        made = jax.sharding.reshard(made, kind.sharding)
    return as_varying(made, varying_axes(kind))


def squared_norm(gradients: Any) -> jax.Array:
    """The squared norm over all leaves, in JAX' widest dtype.

    Example:
        >>> float(squared_norm({"a": jnp.ones(3), "b": jnp.asarray(2.0)}))
        7.0
    """
    wide = jnp.result_type(float)
    leaves = jax.tree.leaves(gradients)
    return sum((jnp.sum(jnp.square(jnp.abs(leaf)), dtype=wide) for leaf in leaves), jnp.zeros((), wide))


def stated_bytes(compiled: Any) -> int:
    """The memory that XLA states for arguments, results and temporaries of a compiled program."""
    stated = compiled.memory_analysis()
    total = stated.argument_size_in_bytes + stated.output_size_in_bytes + stated.temp_size_in_bytes
    return int(total - stated.alias_size_in_bytes)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of those inside of it (jit, scan, cond, custom derivatives)."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def drawn_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of the random numbers that are drawn from each key, sorted.

    Example:
        >>> draw = jax.make_jaxpr(lambda key: jax.random.normal(key, (4, 3)))(jax.random.key(0))
        >>> drawn_shapes(draw.jaxpr)
        [(4, 3)]
    """
    drawn = [each for each in equations(jaxpr) if each.primitive.name == "random_bits"]
    return sorted(tuple(each.params["shape"]) for each in drawn)
