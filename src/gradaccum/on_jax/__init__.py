"""What both shells need where the arrays are JAX's: fast convolutions in loops, and outputs that run once more.

The shells are the JAX shell, and Keras on its JAX backend.

XLA has quick code for convolutions on a CPU, for one order of dimensions: rows, space, features. It brings others,
as gradients have them, into that order, but nowhere inside a loop, where they take several times as long. Grouped
convolutions, of which it makes others by itself, keep what it makes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

from gradaccum.core.sizes import free_host_memory

__all__ = ["free_memory", "recomputed", "scan"]


def free_memory() -> float | None:
    """Bytes that the device has left; None where nobody says."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else free_host_memory()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which inputs need a gradient, by position: known when the first pass is traced, and needed in the second."""

    positions: tuple[int, ...]


def recomputed(first: Callable[..., Any], second: Callable[..., list[Any]]) -> Callable[..., Any]:
    """`first(inputs, others) -> (outputs, more)`, of which nothing is kept: `second` has the gradients of the inputs.

    `second(inputs, others, upstream, wanted)` takes those of the outputs, None where there is none, and the positions
    of the inputs that need one. Nothing else gets a gradient.

    Example:
        >>> def double(inputs, others): return [2.0 * one for one in inputs], None
        >>> def gradients(inputs, others, upstream, wanted): return [2.0 * given for given in upstream]
        >>> run = recomputed(double, gradients)
        >>> float(jax.grad(lambda x: run([x], [])[0][0])(1.0))
        2.0
    """

    def is_inexact(value: Any) -> bool:
        return jnp.issubdtype(value.dtype, jnp.inexact)

    def forward(inputs: Any, others: Any) -> Any:
        wanted = tuple(n for n, each in enumerate(inputs) if each.perturbed and is_inexact(each.value))
        inputs, others = ([each.value for each in some] for some in (inputs, others))
        return first(inputs, others), (inputs, others, _Wanted(wanted))

    def backward(kept: Any, cotangents: Any) -> Any:
        inputs, others, wanted = kept
        upstream = [None if isinstance(one, SymbolicZero) or not is_inexact(one) else one for one in cotangents[0]]
        return second(inputs, others, upstream, wanted.positions), None

    run = jax.custom_vjp(first)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def scan(body: Callable[[Any, Any], Any], carry: Any, xs: Any, length: int | None = None) -> tuple[Any, Any]:
    """`jax.lax.scan(body, carry, xs, length)`, whose convolutions come in XLA's own order on a CPU.

    Example:
        >>> import jax.numpy as jnp
        >>> total, _ = scan(lambda total, x: (total + x, None), jnp.zeros(()), jnp.arange(4.0))
        >>> float(total)
        6.0
    """
    if jax.default_backend() != "cpu":
        return jax.lax.scan(body, carry, xs, length)

    def ordered(carry: Any, x: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(carry, x)
        found = jaxpr_as_fun(closed.replace(jaxpr=_ordered(closed.jaxpr)))(*jax.tree.leaves((carry, x)))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return jax.lax.scan(ordered, carry, xs, length)


def _ordered(jaxpr: Jaxpr) -> Jaxpr:
    """The same computation, with convolutions of rows, space and features: those of the jaxprs inside of it, too."""
    equations = [_equation(equation) for equation in jaxpr.eqns]
    same = all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=equations)


def _equation(equation: JaxprEqn) -> JaxprEqn:
    if equation.primitive.name == "conv_general_dilated":
        order = _Order(equation.params["dimension_numbers"])
        return equation if order.is_own else _through_own_order(equation, order)
    params = {name: _param(value) for name, value in equation.params.items()}
    same = all(params[name] is value for name, value in equation.params.items())
    return equation if same else equation.replace(params=params)


def _param(value: Any) -> Any:
    if isinstance(value, tuple) and any(hasattr(each, "eqns") for each in value):
        parts = map(_param, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)  # solvers come as a named tuple
    if not hasattr(value, "eqns"):
        return value
    inner = getattr(value, "jaxpr", value)
    new = _ordered(inner)
    if new is inner:
        return value
    return new if inner is value else value.replace(jaxpr=new)


class _Order:
    """What permutes dimensions into XLA's order: `(rows, *space, features)`, and `(*space, in, out)` of the kernel."""

    def __init__(self, numbers: Any) -> None:
        def last(spec: tuple[int, ...]) -> tuple[int, ...]:
            return spec[0], *spec[2:], spec[1]

        out, features, *space = numbers.rhs_spec
        self.of_rows = last(numbers.lhs_spec)
        self.of_kernel = (*space, features, out)
        self.of_result = tuple(map(int, np.argsort(last(numbers.out_spec))))
        dimensions = len(numbers.lhs_spec)
        own = (0, dimensions - 1, *range(1, dimensions - 1))
        kernel = (dimensions - 1, dimensions - 2, *range(dimensions - 2))
        self.own = jax.lax.ConvDimensionNumbers(own, kernel, own)
        self.is_own = numbers == self.own


def _through_own_order(equation: JaxprEqn, order: _Order) -> JaxprEqn:
    """A call that permutes, convolves and permutes back, in the place of a convolution."""
    params = equation.params | {"dimension_numbers": order.own}

    def convolution(rows: Any, kernel: Any) -> Any:
        rows, kernel = rows.transpose(order.of_rows), kernel.transpose(order.of_kernel)
        return equation.primitive.bind(rows, kernel, **params).transpose(order.of_result)

    (call,) = jax.make_jaxpr(jax.jit(convolution))(*(each.aval for each in equation.invars)).eqns
    return equation.replace(primitive=call.primitive, params=call.params)
