"""Arrays (the devices of their types, zeros of a type, the squared norm of many), and what a traced function does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType


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
