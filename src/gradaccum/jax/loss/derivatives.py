"""Custom derivatives in a loss, `custom_vjp` and `custom_jvp`: what they do with the gradients of their outputs.

That is another factor in each micro-batch: a gradient must be multiplied by it once, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from gradaccum.jax.loss.walk import SHARED, Equation, Term, Value, is_ours, mixes, unknown


def check_derivative(e: Equation, inputs: list[Value], outputs: list[Value]) -> None:
    """Follow gradients of the outputs to those of the inputs, through the derivative that the equation has.

    Forward may be another function there than without a gradient: the outputs become what it makes.
    """
    walk, traced = e.walk, e.traced[-1]
    if walk.is_derivative or _is_of_jax(e.params) or any(v.flaw for v in (*inputs, *outputs)):
        return
    wanted = [n for n in _floating(traced.invars) if not (inputs[n].free or isinstance(traced.invars[n], Literal))]
    given = [n for n in _floating(traced.outvars) if type(traced.outvars[n]).__name__ != "DropVar"]
    if not (wanted and given):
        return
    number = walk.number("gradient", id(traced))
    walk.sources["gradient", number] = source = e.source._replace(number=number)
    terms = frozenset([Term(True, frozenset([(("gradient", number), 1)]))])
    gradients = [Value(terms, outputs[n].place, number=walk.number("gradient", n, number)) for n in given]
    walk.is_derivative = True
    try:
        found = walk.run([_pullback(each, wanted, given) for each in e.traced], [*inputs, *gradients])
    finally:
        walk.is_derivative = False
    for n, output in zip(given, found):
        outputs[n] = output
    for n, gradient in zip(wanted, found[len(given) :]):
        _check(gradient, inputs[n].place, terms, source)
        if not gradient.terms <= terms:
            walk.added.append(source)


def _check(gradient: Value, place: Any, terms: Any, source: Any) -> None:
    """Of an input whose rows lie there: it has each row's factor `terms` once, and mixes nothing."""
    if gradient.flaw is not None and gradient.flaw.kind == "unknown":
        raise unknown(f"its derivative: {gradient.flaw.why or gradient.flaw.source.primitive}")
    fits = gradient.terms <= (terms if place is not None else terms | SHARED)
    if gradient.flaw is not None or not fits or (gradient.terms and gradient.place != place):
        raise mixes(source=source)


def _is_of_jax(params: dict[str, Any]) -> bool:
    """Whether a function and its derivative are JAX' own, and aren't what `jax.custom_gradient` makes of others."""

    def path(of: Any) -> str:
        return (getattr(getattr(of, "debug_info", None), "func_src_info", None) or "").rpartition(" at ")[2]

    function, rule = path(params["call_jaxpr"].jaxpr), path(params.get("bwd", params.get("jvp_jaxpr_fun")))
    return is_ours(function) and is_ours(rule) and "custom_derivatives" not in function


def _floating(variables: Sequence[Any]) -> list[int]:
    return [n for n, variable in enumerate(variables) if jnp.issubdtype(variable.aval.dtype, jnp.floating)]


def _pullback(traced: Any, wanted: list[int], given: list[int]) -> Any:
    """From inputs and the gradients of these outputs to these outputs, and the gradients of these inputs."""
    variables = [v for v in dict.fromkeys(v for v in traced.invars if not isinstance(v, Literal))]
    debug_info = traced.params["call_jaxpr"].jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    alone = Jaxpr((), variables, [traced.outvars[n] for n in given], [traced], traced.effects, debug_info)
    run = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def function(values: list[Any], gradients: list[Any]) -> Any:
        def outputs(some: list[Any]) -> list[Any]:
            mine = dict(zip(traced.invars, values)) | {traced.invars[n]: value for n, value in zip(wanted, some)}
            return run(*(mine[v] for v in variables))

        found, pull = jax.vjp(outputs, [values[n] for n in wanted])
        return found, pull(gradients)[0]

    return jax.make_jaxpr(function)(kinds_of(traced.invars), [kinds_of(traced.outvars)[n] for n in given])


def kinds_of(variables: Any) -> list[Any]:
    """The types of a jaxpr's variables, to trace something else with."""
    return [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in variables]
