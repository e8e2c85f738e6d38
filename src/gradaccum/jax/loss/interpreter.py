"""Follows the rows through a loss that was traced for two numbers of rows, operation by operation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from gradaccum.jax.loss.algebra import (
    COUNT,
    FINITE,
    LIFTED,
    NAN,
    ONE,
    POSITIVE,
    ROWS,
    SHARED,
    CannotTell,
    Known,
    Lost,
    MixesRows,
    Place,
    Source,
    Symbol,
    Term,
    Terms,
    Value,
    common_place,
    elsewhere,
    exponent,
    lifted,
    of,
    power,
    symbols_of,
)

__all__ = ["NESTED_RULES", "Equation", "Interpreter", "Rule", "does_alike", "is_integral", "line"]

Rule = Callable[["Interpreter", "Equation", list[Any]], Any]
"""From what is known of an operation's inputs to what is known of its output, or of all of its outputs in a list."""
_SHAPES = {
    "axis_size", "batch_group_count", "feature_group_count", "inline", "k", "length", "name", "out_sharding",
    "sharding", "size",
}  # fmt: skip
"""Parameters that go with the rows where shapes do, which is looked at; the length of a scan is by its rule."""
_EXTENTS = {"limit_indices", "padding_config", "slice_sizes", "start_indices"}
"""Of all axes but that of the rows, they are the same."""
_PICKS = {"dynamic_slice", "gather", "slice", "split"}
_LINEAR = {
    *_PICKS, "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum",
    "expand_dims", "neg", "pad", "psum", "reduce_sum", "reshape", "rev", "squeeze", "stop_gradient", "sub", "transpose",
}  # fmt: skip
_BILINEAR = {"conv_general_dilated", "div", "dot_general", "mul"}
"""Linear where all others are the same for any rows."""
_INTEGRAL = {
    *_LINEAR, "abs", "dot_general", "max", "min", "mul", "reduce_max", "reduce_min", "scatter-add", "select_n", "sort",
    "square",
}  # fmt: skip
"""Of whole numbers they give whole numbers; and, but for differences, of positive numbers positive ones."""
_STEPS = {"argmax", "argmin", "ceil", "convert_element_type", "floor", "round", "sign"}
"""Of a statistic of the batch, they may be the same for all micro-batches, as questions may."""
_LATE = 1 << 40


class Equation:
    """One operation, at both numbers of rows; `number` is equal for operations that compute the same."""

    def __init__(self, one: Any, other: Any, source: Source, number: Any) -> None:
        self.name, self.source, self.number, self.traced = one.primitive.name, source, number, (one, other)
        self.params, self.other_params = one.params, other.params
        scalar: tuple[int, ...] = ()
        self.shapes, self.outputs, self.other_outputs = (
            [getattr(variable.aval, "shape", scalar) for variable in some]
            for some in (one.invars, one.outvars, other.outvars)
        )
        self.dtypes = [[getattr(v.aval, "dtype", None) for v in some] for some in (one.invars, one.outvars)]


class Interpreter:
    """Two traces of a loss, side by side."""

    def __init__(self, rows: tuple[int, int], rules: dict[str, Rule]) -> None:
        self.rows, self.rules = rows, rules
        self._numbers: dict[Any, int] = {}
        self.callers: list[tuple[str, Any]] = []
        """The functions that are being walked through: their names, and who has called them."""
        self.is_derivative = False
        """Whether it is a derivative that is walked through."""
        self.split: frozenset[str] = frozenset()
        """The axes of devices that the rows are split over, inside a `shard_map`."""
        self.logarithms: dict[Symbol, Terms] = {}
        """Of a symbol that is an exponential, the terms it is that of."""

    def number(self, *key: Any) -> int:
        """One number for all that is computed alike."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, first: Any, second: Any, inputs: Sequence[Known]) -> list[Known]:
        """What is known of the outputs of a jaxpr, closed or not."""
        (first, consts), (second, others) = _opened(first), _opened(second)
        if [e.primitive.name for e in first.eqns] != [e.primitive.name for e in second.eqns]:
            raise CannotTell("other operations")
        known: dict[Any, Known] = dict(zip(first.invars, inputs, strict=True))
        known.update((v, self._constant(a, b)) for v, a, b in zip(first.constvars, consts, others, strict=True))

        def read(variable: Any, other: Any) -> Known:
            is_literal = isinstance(variable, Literal)
            return self._constant(variable.val, other.val) if is_literal else known[variable]

        for one, other in zip(first.eqns, second.eqns):
            values = [read(*pair) for pair in zip(one.invars, other.invars, strict=True)]
            known.update(zip(one.outvars, self._outputs(one, other, values), strict=True))
        return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]

    def _constant(self, first: Any, second: Any) -> Known:
        """What is known of an array that was written down."""
        number, is_traced = self.number("constant", id(first)), isinstance(first, jax.core.Tracer)
        if np.shape(first) != np.shape(second):
            same = not is_traced and np.size(first) and bool((np.asarray(first) == np.ravel(first)[0]).all())
            terms = SHARED if same else of(Symbol(number, "position", scalar=False, source=Source("constant")), True)
            return Value(terms, self.place_by_shapes(np.shape(first), np.shape(second)), number)
        if is_traced or np.size(first) != 1 or not _is_number(first):
            integral = is_integral(getattr(first, "dtype", None))
            return Value(SHARED, None, number, scalar=np.size(first) == 1, integral=integral)
        return self.of_values(np.asarray(first).item(), np.asarray(second).item())

    def of_values(self, first: Any, second: Any) -> Value:
        """What is known of a number that is known at both numbers of rows."""
        number = self.number("value", repr(first), repr(second))
        degree = exponent(first, second, self.rows[1] / self.rows[0]) if first == first else Fraction(0)
        terms: Terms = frozenset()
        if degree is None:
            terms = of(Symbol(number, "count", source=Source("constant")))
        elif not first == 0 == second:
            terms = frozenset([Term(False, power(ROWS, degree) if degree else ONE)])
        integral = all(not isinstance(value, float) or value.is_integer() for value in (first, second))
        positive = min(first, second) >= 0
        return Value(terms, None, number, scalar=True, values=(first, second), integral=integral, positive=positive)

    def place_by_shapes(self, first: Sequence[int], second: Sequence[int]) -> Place | None:
        """Where an array has its rows by its shapes: the axis that differs."""
        axes = [axis for axis, (a, b) in enumerate(zip(first, second)) if a != b]
        if not axes:
            return None
        if len(axes) > 1:
            raise MixesRows("pairs")
        length = first[axes[0]]
        if length % self.rows[0] or length // self.rows[0] * self.rows[1] != second[axes[0]]:
            raise CannotTell("an axis that is no multiple of the rows")
        return Place(axes[0], 1, length // self.rows[0])

    def _outputs(self, one: Any, other: Any, values: list[Any]) -> list[Known]:
        equation = self._equation(one, other, values)
        lost = [value for value in values if isinstance(value, Lost)]
        try:
            if lost and equation.name not in NESTED_RULES:
                zero = [value for value in values if isinstance(value, Value) and not value.terms]
                found = zero[0] if zero and equation.name == "mul" else _carried(lost, values, equation)
                return [found] * len(one.outvars)
            self._check_parameters(equation, values)
            result = self.rules.get(equation.name, _unknown)(self, equation, values)
            result = result if isinstance(result, list) else [result]
            for n, value in enumerate(result):
                if isinstance(value, Value) and value.place is not None:
                    self._check_grown(equation, n, value.place.axis)
            return result
        except MixesRows as error:
            return [self._mixed(error.how, equation, values)] * len(one.outvars)
        except CannotTell as error:
            return [Lost("unknown", equation.source, str(error))] * len(one.outvars)

    def _equation(self, one: Any, other: Any, values: list[Any]) -> Equation:
        name, number = one.primitive.name, None
        if name not in NESTED_RULES and all(isinstance(value, Value) for value in values):
            static = tuple(sorted((key, repr(value)) for key, value in one.params.items() if key != "sharding"))
            number = self.number(name, static, *(value.number for value in values))
        return Equation(one, other, Source(name, _called_from(one.source_info, self.callers)), number)

    def _mixed(self, how: str, equation: Equation, values: list[Any]) -> Lost:
        """A pattern of rows by rows, such as an identity matrix, is not what mixes them."""
        terms = [term for value in values for term in getattr(value, "terms", ()) if term.own]
        is_lost = any(isinstance(value, Lost) for value in values)
        if not is_lost and all(any(symbol.kind == "position" for symbol, _ in term.factor) for term in terms):
            return Lost("unsure", equation.source, early=len(self._numbers) + _LATE)
        certain = how in ("mixed", "some") or (how == "pairs" and equation.name not in _LINEAR)
        return Lost(how, equation.source, early=len(self._numbers), certain=certain)

    def _check_parameters(self, equation: Equation, values: list[Known]) -> None:
        """Numbers that an operation is given beside its inputs: powers, and where a slice begins and ends."""
        first = values[0] if values and isinstance(values[0], Value) else None
        for name, value in equation.params.items():
            other: Any = equation.other_params.get(name)
            if name in _EXTENTS and isinstance(value, tuple):
                if first is not None and first.values is not None:
                    continue
                rows = first.place.axis if first is not None and first.place is not None else None
                value, other = ([each for axis, each in enumerate(some) if axis != rows] for some in (value, other))
            elif name in _SHAPES or not isinstance(value, bool | int | float | str):
                continue
            if repr(value) != repr(other):  # NaN is not itself
                raise CannotTell(f"{name}={value} for {self.rows[0]} rows, {name}={other} for {self.rows[1]}")

    def _check_grown(self, equation: Equation, n: int, axis: int | None = None) -> None:
        """Where an array has rows, no other axis may grow with them."""
        first, second = equation.outputs[n], equation.other_outputs[n]
        grown = {axis for axis, (a, b) in enumerate(zip(first, second)) if a != b}
        if len(grown) > 1 or (axis is not None and grown - {axis}):
            raise CannotTell(f"shape {first} for {self.rows[0]} rows, {second} for {self.rows[1]}")

    def placed(self, equation: Equation, place: Place | None, n: int = 0) -> Place | None:
        """Where an output has the rows that an input has at `place`: in the axis whose length goes with them."""
        if place is None or place == LIFTED:
            return place
        self._check_grown(equation, n)
        found = self.place_by_shapes(equation.outputs[n], equation.other_outputs[n])
        return None if found is None else place._replace(axis=found.axis)

    def aligned(self, equation: Equation, inputs: Sequence[Value]) -> tuple[Place | None, list[Value]]:
        """Where arrays of one shape have their rows, and all of them as these rows have them."""
        place = common_place(inputs)
        return place, [lifted(value, place, equation.source) for value in inputs]

    def made(
        self,
        equation: Equation,
        inputs: Sequence[Value],
        terms: Any,
        place: Place | None,
        n: int = 0,
        *,
        moves: bool = True,
    ) -> Value:
        """What is known of an output that follows from these inputs; `moves`: not entry by entry."""
        size = int(np.prod(equation.outputs[n], dtype=np.int64))
        terms = elsewhere(terms, equation.number) if moves else terms
        if place is not None and place.axis >= 0:
            size //= max(equation.outputs[n][place.axis], 1)
        name, dtype = equation.name, str(equation.dtypes[1][n])
        is_even = name == "integer_pow" and equation.params["y"] % 2 == 0
        keeps_sign = name in _INTEGRAL - {"neg", "sub"} | {"div"} and all(value.positive for value in inputs)
        found = Value(
            terms,
            place,
            equation.number if n == 0 else self.number("output", equation.number, n),
            scalar=size == 1,
            integral=is_integral(dtype) or (name in _INTEGRAL and all(value.integral for value in inputs)),
            positive=keeps_sign or is_even or name in POSITIVE or dtype.startswith(("bool", "uint")),
            **_followed(inputs),
        )
        # No gradient goes through whole numbers. A question about the batch may have one answer in all micro-batches.
        asks = (dtype == "bool" or name in _STEPS) and place is None
        asks = asks and any(symbol.kind == "mixed" for symbol in symbols_of(found))
        return found.but(free=found.free or is_integral(dtype), unsure=found.unsure or asks)


def _followed(values: Sequence[Value]) -> dict[str, Any]:
    """What a number inherits from those that it follows from."""
    found: dict[str, Any] = {name: any(getattr(v, name) for v in values) for name in ("fresh", "unsure", "local")}
    found |= {name: frozenset().union(*(getattr(v, name) for v in values)) for name in ("sums", "doubts", "state")}
    return found | {"free": all(value.free for value in values)}


def _unknown(walk: Interpreter, equation: Equation, values: list[Value]) -> list[Known]:
    """A primitive without a rule: what follows from no row stays so."""
    no_rows = equation.outputs == equation.other_outputs and (values or not walk.split)
    if no_rows and all(value.is_shared for value in values):
        return [walk.made(equation, values, SHARED, None, n) for n in range(len(equation.outputs))]
    raise CannotTell(equation.name)


def _carried(lost: list[Lost], values: list[Any], equation: Equation) -> Lost:
    """What an operation makes of what is lost: is it certain that rows are mixed in a way that nothing takes back?"""
    first, name = min(lost, key=lambda each: (each.how == "unknown", each.early)), equation.name
    hows, how, certain = {each.how for each in lost}, first.how, first.certain
    meets = len(lost) > 1 or any(isinstance(value, Value) and value.own for value in values)
    nonlinear = name not in _LINEAR and (name not in _BILINEAR or meets)
    fewer = _growing(equation.traced, "invars") > _growing(equation.traced, "outvars")
    if how == "order":  # sums over the rows are what they were; rows that meet others, or some of them, are not
        how, certain = "order", False
        if meets and name not in ("concatenate", "gather", "sort"):
            how, certain = "mixed", nonlinear
        elif fewer:
            how, certain = "mixed", nonlinear or name in _PICKS
    elif how == "some" and len(lost) > 1:  # what is missing in one may be in the other
        how, certain = ("order", False) if name == "concatenate" else ("mixed", nonlinear)
    elif "mixed" in hows:
        how, certain = "mixed", nonlinear or any(each.certain for each in lost)
    elif how == "pairs" and fewer and name in _PICKS:  # a diagonal may be picked, or masked and summed
        how, certain = "unsure", False
    elif how == "pairs":
        masked = "unsure" in hows and name in ("mul", "select_n")
        how, certain = "mixed" if fewer else "pairs", not masked and (certain or nonlinear)
    return first._replace(how=how, certain=certain)


def _growing(traced: tuple[Any, Any], side: str) -> int:
    """The most axes of an input or output whose length goes with the rows."""
    pairs = zip(*(getattr(each, side) for each in traced))
    return max((sum(x != y for x, y in zip(np.shape(a.aval), np.shape(b.aval))) for a, b in pairs), default=0)


def joined(walk: Interpreter, a: Known, b: Known) -> Known:
    """What is known of a number that is one of both."""
    if a == b:
        return a
    if isinstance(a, Lost) or isinstance(b, Lost):
        some = [value for value in (a, b) if isinstance(value, Lost)]
        return min(some, key=lambda each: (each.how == "unknown", not each.certain, each.early))
    try:
        place = common_place([a, b])
    except MixesRows:
        return Lost("unsure", Source("branches"))
    both: dict[str, Any] = {
        name: getattr(a, name) if getattr(a, name) == getattr(b, name) else None for name in ("values", "guard")
    }
    both |= {name: getattr(a, name) and getattr(b, name) for name in ("scalar", "position", "integral", "positive")}
    number = a.number if a.number == b.number else walk.number("either", a.number, b.number)
    return Value(a.terms | b.terms, place, number, **both, **_followed([a, b]))


_LAYOUT = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
"""What a single row needs none of."""


def does_alike(first: Any, second: Any, third: Any, rows: tuple[int, int]) -> bool:
    """Whether a loss does the same for other rows.

    Its operations are the same, and so are its numbers, or they go with the power of the rows that they go with from
    the first to the second.
    """
    traces = [list(_done(closed)) for closed in (first, second, third)]

    def goes_on(one: Any, two: Any, three: Any) -> bool:
        if isinstance(one, str) or isinstance(three, str):
            return bool(one == three)
        degree = exponent(one, two, 2)
        expected = three if degree is None else one * (rows[1] / rows[0]) ** float(degree)
        return bool(three == expected or abs(three - expected) <= 1e-5 * abs(expected))

    return len({len(trace) for trace in traces}) == 1 and all(map(goes_on, *traces))


def _done(closed: Any) -> Iterator[Any]:
    """The names of all operations of a jaxpr, and the numbers that are written down in it."""
    jaxpr, consts = _opened(closed)
    yield from _finite_numbers(consts)
    for equation in jaxpr.eqns:
        if equation.primitive.name in _LAYOUT:
            continue
        yield equation.primitive.name
        yield from _finite_numbers(v.val for v in equation.invars if isinstance(v, Literal))
        for name, value in sorted(equation.params.items()):
            if name in ("y", "k", "reverse", "exponent"):
                yield float(value) if isinstance(value, int | float) else str(value)
            for each in value if isinstance(value, tuple | list) else [value]:
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from _done(each)


def _finite_numbers(values: Any) -> Iterator[float]:
    for value in values:
        if not isinstance(value, jax.core.Tracer) and np.size(value) == 1 and _is_number(value):
            number = float(np.asarray(value).item())
            if np.isfinite(number):
                yield number


def _opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _is_number(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf" or str(np.asarray(value).dtype) == "bfloat16"
    except TypeError:
        return False


def is_integral(dtype: Any) -> bool:
    """Whether numbers of this dtype are whole."""
    return str(dtype).startswith(("bool", "int", "uint"))


_OWN = tuple(os.path.dirname(path) + os.sep for path in (jax.__file__, os.path.dirname(__file__)))
_PACKAGES = f"{os.sep}site-packages{os.sep}"


def _is_ours(path: str) -> bool:
    """Whether this is a module of JAX, or of this package."""
    return path.startswith(_OWN)


def _frames(info: Any) -> list[Any]:
    """The calls that led to an operation, the innermost first, without JAX' own."""
    frames = getattr(getattr(info, "traceback", None), "frames", None) or []
    return [frame for frame in frames if not _is_ours(frame.file_name)]


def _called_from(info: Any, callers: list[tuple[str, Any]]) -> Any:
    """Who has asked for an operation inside of functions that JAX may have traced for somebody else before."""
    for name, caller in reversed(callers):
        frames = _frames(info)
        if not name or (frames and frames[0].function_name.rpartition(".")[2] == name):
            break
        info = caller
    return info


def line(info: Any) -> str:
    """ "train.py:12", or "normalization.py:40, from train.py:12" for what a package does; "" where it is unknown."""
    frames = _frames(info)
    if not frames:
        return ""
    inner = frames[0]
    mine = next((frame for frame in frames if _PACKAGES not in frame.file_name), inner)
    text = f"{os.path.basename(inner.file_name)}:{inner.line_num}"
    return text if mine is inner else f"{text}, from {os.path.basename(mine.file_name)}:{mine.line_num}"


# Primitives that hold jaxprs: calls, loops, branches; they take what is lost, too.

_ROUNDS = 6
"""Times that a loop's body is looked at until what is known of its carry stays."""


def _called(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    name = next((name for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in equation.params), None)
    if name is None:
        raise CannotTell(equation.name)
    walk.callers.append((equation.params.get("name", ""), equation.source.info))
    try:
        return walk.run(equation.params[name], equation.other_params[name], inputs)
    finally:
        walk.callers.pop()


def _with_own_derivative(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    """`custom_vjp` and `custom_jvp`: forward, and what they do with the gradients of their outputs.

    These are another factor in each micro-batch: a gradient must be multiplied by it once, row by row.
    """
    outputs, traced = _called(walk, equation, inputs), equation.traced[0]
    before, after = ([value for value in some if isinstance(value, Value)] for some in (inputs, outputs))
    where = getattr(getattr(equation.params["call_jaxpr"].jaxpr, "debug_info", None), "func_src_info", None) or ""
    if walk.is_derivative or _is_ours(where.rpartition(" at ")[2]) or len(before + after) < len(inputs + outputs):
        return outputs
    wanted = [n for n in _floats(traced.invars) if not (before[n].free or isinstance(traced.invars[n], Literal))]
    given = [n for n in _floats(traced.outvars) if type(traced.outvars[n]).__name__ != "DropVar"]
    if not (wanted and given):
        return outputs
    factor = of(Symbol(walk.number("gradient", id(traced)), "mixed", False), True)
    gradients = [Value(factor, after[n].place, walk.number(factor, n), free=False) for n in given]
    walk.is_derivative = True
    try:
        first, second = (_pullback(each, wanted, given) for each in equation.traced)
        found = walk.run(first, second, [*before, *gradients])
    finally:
        walk.is_derivative = False
    lost = [_mixed_gradient(each, before[n].place, factor, equation) for n, each in zip(wanted, found)]
    wrong = next((each for each in lost if each is not None), None)
    return outputs if wrong is None else [wrong] * len(outputs)


def _floats(variables: Any) -> list[int]:
    return [n for n, variable in enumerate(variables) if jnp.issubdtype(variable.aval.dtype, jnp.floating)]


def _mixed_gradient(gradient: Known, place: Place | None, each: Terms, equation: Equation) -> Lost | None:
    """None where it is each row's own times the gradient that comes in."""
    if isinstance(gradient, Lost):
        why = f"its derivative: {gradient.message or gradient.source.primitive}"
        return gradient._replace(source=equation.source, message=why)
    allowed = each | SHARED if place is None else each
    if gradient.terms <= allowed and (not gradient.terms or gradient.place == place):
        return None
    return Lost("mixed", equation.source, certain=True)


def _pullback(traced: Any, wanted: list[int], given: list[int]) -> Any:
    """From inputs and the gradients of these outputs to the gradients of these inputs."""
    variables = [v for v in dict.fromkeys(v for v in traced.invars if not isinstance(v, Literal))]
    debug_info = traced.params["call_jaxpr"].jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    alone = Jaxpr((), variables, [traced.outvars[n] for n in given], [traced], traced.effects, debug_info)
    run = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def function(values: list[Any], gradients: list[Any]) -> Any:
        def outputs(some: list[Any]) -> list[Any]:
            mine = dict(zip(traced.invars, values)) | {traced.invars[n]: value for n, value in zip(wanted, some)}
            return run(*(mine[v] for v in variables))

        return jax.vjp(outputs, [values[n] for n in wanted])[1](gradients)[0]

    kinds = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in some] for some in (traced.invars, traced.outvars)
    ]
    return jax.make_jaxpr(function)(kinds[0], [kinds[1][n] for n in given])


def _carry(
    walk: Interpreter, equation: Equation, body: Callable[[list[Known]], list[Known]], carry: list[Known]
) -> list[Known]:
    """What is known of a loop's carry in any round."""

    def facts(value: Known) -> Any:
        if isinstance(value, Lost):
            return value.how, value.certain
        return value.terms, value.place, value.fresh, value.free, value.state, value.doubts, value.unsure

    def widened(value: Known) -> Known:
        """In a loop each round would make symbols of its own."""
        if isinstance(value, Lost):
            return value
        for symbol in symbols_of(value):
            if symbol != COUNT and symbol.kind in ("mixed", "sum", "count"):
                how = "unsure" if value.unsure else "mixed"
                return Lost(how, symbol.source or equation.source, "", symbol.origin, certain=not value.unsure)
        return value

    carry = [value.but(values=None, position=False) if isinstance(value, Value) else value for value in carry]
    for _ in range(_ROUNDS):
        after = [widened(joined(walk, *pair)) for pair in zip(carry, body(carry))]
        stays = [facts(a) == facts(b) for a, b in zip(carry, after)]
        carry = [a if same else b for a, b, same in zip(carry, after, stays)]
        if all(stays):
            return carry
    raise CannotTell(equation.name)


def _scanned(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    params = equation.params
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, entries = inputs[:first], inputs[first:second], [_entry(value) for value in inputs[second:]]
    over_rows = any(isinstance(value, Value) and value.place == LIFTED for value in entries)
    if not over_rows and params["length"] != equation.other_params["length"]:
        raise CannotTell(f"{params['length']} rounds for {walk.rows[0]} rows")

    def body(carry: list[Known]) -> list[Known]:
        return walk.run(params["jaxpr"], equation.other_params["jaxpr"], [*consts, *carry, *entries])

    if not over_rows or not carry:
        carry = _carry(walk, equation, lambda carry: body(carry)[: len(carry)], carry)
    found = body(carry)
    if over_rows and carry:
        if not all(isinstance(value, Value) and value.is_shared for value in (*carry, *found[: len(carry)])):
            raise CannotTell("scan over rows")
        carry = found[: len(carry)]
    return [*carry, *(_rounds(value) for value in found[len(carry) :])]


def _entry(value: Known) -> Known:
    """What one round of a scan gets of an array."""
    if isinstance(value, Lost):
        return value
    value, place = value.but(values=None, position=False, parts=None), value.place
    if place is None or place == LIFTED:
        return value
    if place.axis == 0 and place[1:] != (1, 1):
        raise CannotTell("scan over parts of the rows")
    return value.but(place=place._replace(axis=place.axis - 1))  # LIFTED where it is over rows


def _rounds(value: Known) -> Known:
    """What a scan makes of what its rounds give."""
    if isinstance(value, Lost):
        return value
    place = value.place and value.place._replace(axis=value.place.axis + 1)
    return value.but(place=place, scalar=False, values=None, position=False)


def _looped(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    params, other = equation.params, equation.other_params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    bodies = params["body_jaxpr"], other["body_jaxpr"]
    carry = _carry(walk, equation, lambda carry: walk.run(*bodies, [*inputs[first:second], *carry]), inputs[second:])
    (goes_on,) = walk.run(params["cond_jaxpr"], other["cond_jaxpr"], [*inputs[:first], *carry])
    if isinstance(goes_on, Lost) or not goes_on.is_shared:
        raise CannotTell("while")
    return carry


def _branched(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    which, *rest = inputs
    pairs = list(zip(equation.params["branches"], equation.other_params["branches"], strict=True))
    if isinstance(which, Lost) or not (which.values or which.guard or which.is_shared):
        raise CannotTell("cond")
    if which.values is not None and which.values[0] == which.values[1]:
        return walk.run(*pairs[int(which.values[0])], rest)
    found = [walk.run(one, other, rest) for one, other in pairs]
    if which.guard:  # the branches must be what it asks for, and numbers that are written down
        known = [value for each in found for value in each if isinstance(value, Value) and value.values is None]
        if not known or not (which.guard in (FINITE, NAN) or all(value.divides(which.guard) for value in known)):
            raise MixesRows("unsure")
    result = found[0]
    for each in found[1:]:
        result = [joined(walk, *pair) for pair in zip(result, each, strict=True)]
    return [
        value.but(state=value.state | which.state, doubts=value.doubts | which.doubts)
        if isinstance(value, Value)
        else value
        for value in result
    ]


def _on_devices(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    """`shard_map`: the same on each device, for the rows that it has, whose sums are parts of the batch's."""
    params = equation.params

    def axes_of(spec: Any, axis: int) -> frozenset[str]:
        part = spec[axis] if 0 <= axis < len(spec) else None
        return frozenset(part if isinstance(part, tuple) else () if part is None else (part,))

    values = [value for value in inputs if isinstance(value, Value)]
    splits = {axes_of(spec, value.place.axis) for value, spec in zip(values, params["in_specs"]) if value.place}
    if len(splits) > 1 or walk.split or len(values) < len(inputs):
        raise CannotTell(equation.name)
    split = next(iter(splits), frozenset())
    count = math.prod(params["mesh"].shape[name] for name in split)
    if count == 1:
        return walk.run(params["jaxpr"], equation.other_params["jaxpr"], inputs)
    if any(value.place and value.place[1:] != (1, 1) for value in values):
        raise CannotTell(equation.name)
    given = [value.but(position=False) if value.place else value for value in values]
    rows, walk.split = walk.rows, split
    walk.rows = rows[0] // count, rows[1] // count
    try:
        found = walk.run(params["jaxpr"], equation.other_params["jaxpr"], given)
    finally:
        walk.rows, walk.split = rows, frozenset()

    def together(value: Known, spec: Any) -> Known:
        """What all devices give: their rows behind each other, or what is the same on all of them."""
        if isinstance(value, Lost):
            return value
        elsewhere = value.place not in (None, LIFTED) and axes_of(spec, value.place.axis) != split
        if elsewhere or (value.local and not any(symbol.kind == "mixed" for symbol in symbols_of(value))):
            return Lost("unsure", equation.source)
        return value.but(scalar=False, values=None) if value.place is None and spec else value

    return [together(*pair) for pair in zip(found, params["out_specs"])]


def _solves(walk: Interpreter, equation: Equation, inputs: list[Known]) -> list[Known]:
    """`custom_linear_solve`: what it solves with; its derivative is that of the solution."""
    lengths = equation.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    solve = [*inputs[start : start + lengths.solve], *inputs[sum(length or 0 for length in lengths) :]]
    return walk.run(equation.params["jaxprs"].solve, equation.other_params["jaxprs"].solve, solve)


NESTED_RULES: dict[str, Rule] = {
    **dict.fromkeys(("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"), _called),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _with_own_derivative),
    "scan": _scanned,
    "while": _looped,
    "cond": _branched,
    "shard_map": _on_devices,
    "custom_linear_solve": _solves,
}
