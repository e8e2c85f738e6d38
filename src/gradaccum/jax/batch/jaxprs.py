"""What a traced function does, equation by equation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["drawn_shapes", "equations"]


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
