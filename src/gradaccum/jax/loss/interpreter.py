"""Follows the rows through a loss that was traced for two numbers of rows, operation by operation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gradaccum.jax.loss.domain import (
    COUNT,
    LIFTED,
    ONE,
    POSITIVE,
    SHARED,
    CannotTell,
    Lost,
    MixesRows,
    Place,
    Source,
    Symbol,
    Term,
    Value,
    common_place,
    exponent,
    of,
    symbols_of,
)  # fmt: skip

__all__ = [
    "WITH_JAXPRS",
    "Equation",
    "Interpreter",
    "Known",
    "Rule",
    "does_alike",
    "is_ours",
    "is_whole",
    "joined",
    "line",
]

Known = Value | Lost
Rule = Callable[["Interpreter", "Equation", list[Any]], list[Known]]
WITH_JAXPRS = {
    "pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat",
    "remat2", "checkpoint", "scan", "while", "cond", "shard_map", "custom_linear_solve",
}  # fmt: skip
"""Primitives that hold jaxprs: their rules take what is lost, too."""
_SHAPES = {
    "axis_size", "batch_group_count", "feature_group_count", "inline", "k", "length", "name", "out_sharding",
    "sharding", "size",
}  # fmt: skip
"""Parameters that go with the rows where shapes do, which is looked at; the length of a scan is by its rule."""
_EXTENTS = {"limit_indices", "padding_config", "slice_sizes", "start_indices"}
"""Of all axes but that of the rows, they are the same."""
_WHOLE = {
    "abs", "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum", "dot_general",
    "dynamic_slice", "gather", "max", "min", "mul", "neg", "pad", "reduce_max", "reduce_min", "reduce_sum", "reshape",
    "rev", "scatter-add", "select_n", "slice", "sort", "split", "square", "squeeze", "stop_gradient", "sub",
    "transpose",
}  # fmt: skip
"""Of whole numbers, they give whole numbers."""
_MOVES = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "expand_dims", "pad", "reshape", "rev",
    "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
_PICKS = {"dynamic_slice", "gather", "slice", "split"}
_LINEAR = {*_MOVES, *_PICKS, "add", "add_any", "cumsum", "neg", "psum", "reduce_sum", "sub"}
"""Linear in all that they take."""
_BILINEAR = {"conv_general_dilated", "div", "dot_general", "mul"}
"""Linear where all others are the same for any rows."""
_STEPS = {"argmax", "argmin", "ceil", "convert_element_type", "floor", "round", "sign"}
"""Of a statistic of the batch, they may be the same for all micro-batches, as questions may."""
_LATE = 1 << 40


class Equation(NamedTuple):
    """One operation, at both numbers of rows; `number` is equal for operations that compute the same."""

    name: str
    params: dict[str, Any]
    other_params: dict[str, Any]
    shapes: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    other_outputs: list[tuple[int, ...]]
    source: Source
    number: Any
    dtypes: tuple[list[Any], list[Any]]
    traced: tuple[Any, Any]


def _equation(one: Any, other: Any, info: Any) -> Equation:
    def kinds(variables: list[Any], name: str, without: Any) -> list[Any]:
        return [getattr(variable.aval, name, without) for variable in variables]

    name = one.primitive.name
    shapes, outputs, others = (kinds(some, "shape", ()) for some in (one.invars, one.outvars, other.outvars))
    dtypes = kinds(one.invars, "dtype", None), kinds(one.outvars, "dtype", None)
    source = Source(name, info)
    return Equation(name, one.params, other.params, shapes, outputs, others, source, None, dtypes, (one, other))


class Interpreter:
    """Two traces of a loss, side by side."""

    def __init__(self, rows: tuple[int, int], rules: dict[str, Rule]) -> None:
        self.rows, self.rules = rows, rules
        self.ratio = rows[1] / rows[0]
        self._numbers: dict[Any, int] = {}
        self.callers: list[tuple[str, Any]] = []
        """The functions that are being walked through: their names, and who has called them."""
        self.is_derivative = False
        """Whether it is a derivative that is walked through."""
        self.split: frozenset[str] = frozenset()
        """The axes of devices that the rows are split over, inside a `shard_map`."""
        self.whole_of: dict[Any, Any] = {}
        """Of a sum over some axes, what it is a part of the sum of."""
        self.totals: dict[Any, Any] = {}
        """Of the sum over one device's rows, the number of that over all of them."""
        self.logarithms: dict[Any, Any] = {}
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
        known.update((v, self.constant(a, b)) for v, a, b in zip(first.constvars, consts, others, strict=True))

        def read(variable: Any, other: Any) -> Known:
            is_literal = isinstance(variable, Literal)
            return self.constant(variable.val, other.val) if is_literal else known[variable]

        for one, other in zip(first.eqns, second.eqns):
            values = [read(*pair) for pair in zip(one.invars, other.invars, strict=True)]
            known.update(zip(one.outvars, self._outputs(one, other, values), strict=True))
        return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]

    def constant(self, first: Any, second: Any) -> Known:
        """What is known of an array that was written down."""
        shapes = np.shape(first), np.shape(second)
        number, is_traced = self.number("constant", id(first)), isinstance(first, jax.core.Tracer)
        if shapes[0] != shapes[1]:
            same = not is_traced and np.size(first) and bool((np.asarray(first) == np.ravel(first)[0]).all())
            terms = SHARED if same else of(Symbol(number, "position", source=Source("constant"), per_row=True), True)
            return Value(terms, self.place_by_shapes(*shapes), number)
        if is_traced or not _is_number(first) or np.size(first) != 1:
            return Value(SHARED, None, number, np.size(first) == 1, whole=is_whole(getattr(first, "dtype", None)))
        return self.of_values(np.asarray(first).item(), np.asarray(second).item())

    def of_values(self, first: Any, second: Any) -> Value:
        """What is known of a number that is known at both numbers of rows."""
        number = self.number("value", repr(first), repr(second))
        degree = exponent(first, second, self.ratio) if first == first else Fraction(0)
        if first == 0 == second:
            terms: frozenset[Term] = frozenset()
        elif degree is None:
            terms = of(Symbol(number, "count", source=Source("constant")))
        else:
            terms = frozenset([Term(False, frozenset([(COUNT, degree)]) if degree else ONE)])
        whole = all(not isinstance(value, float) or value.is_integer() for value in (first, second))
        return Value(terms, None, number, True, (first, second), whole=whole, positive=min(first, second) >= 0)

    def place_by_shapes(self, first: Sequence[int], second: Sequence[int]) -> Place | None:
        """Where an array has its rows by its shapes: the axis that differs."""
        axes = [axis for axis, (a, b) in enumerate(zip(first, second)) if a != b]
        if len(axes) > 1:
            raise MixesRows("pairs")
        if not axes:
            return None
        length = first[axes[0]]
        if length % self.rows[0] or length // self.rows[0] * self.rows[1] != second[axes[0]]:
            raise CannotTell("an axis that is no multiple of the rows")
        return Place(axes[0], 1, length // self.rows[0])

    def _outputs(self, one: Any, other: Any, values: list[Any]) -> list[Known]:
        name, count = one.primitive.name, len(one.outvars)
        equation = _equation(one, other, _called_from(one.source_info, self.callers))
        lost = [value for value in values if isinstance(value, Lost)]
        if name not in WITH_JAXPRS:
            if lost:
                zero = [value for value in values if isinstance(value, Value) and not value.terms and name == "mul"]
                return [next(iter(zero), None) or _carried(lost, values, equation)] * count
            equation = equation._replace(number=self.number(name, _static(one.params), *(v.number for v in values)))
        try:
            self._check_parameters(equation, values)
            result = self.rules.get(name, _unknown)(self, equation, values)
            for n, value in enumerate(result):
                if isinstance(value, Value) and value.place is not None:
                    self._check_grown(equation, n, value.place.axis)
            return result
        except MixesRows as error:
            return [self._mixed(error.how, equation, values)] * count
        except CannotTell as error:
            return [Lost("unknown", equation.source, str(error))] * count

    def _mixed(self, how: str, equation: Equation, values: list[Any]) -> Lost:
        """A pattern of rows by rows, such as an identity matrix, is not what mixes them."""
        terms = [term for value in values for term in getattr(value, "terms", ())]
        is_lost = any(isinstance(value, Lost) for value in values)
        if not is_lost and all(_is_place(term) for term in terms if term.own):
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

    def made(self, equation: Equation, inputs: Sequence[Value], terms: Any, place: Place | None, n: int = 0) -> Value:
        """What is known of an output that follows from these inputs."""
        size = int(np.prod(equation.outputs[n], dtype=np.int64))
        if place is not None and place.axis >= 0:
            size //= max(equation.outputs[n][place.axis], 1)
        name, dtype = equation.name, str(equation.dtypes[1][n])
        kept = name in _WHOLE | {"div"} and name not in ("neg", "sub") and all(value.positive for value in inputs)
        found = Value(
            terms,
            place,
            equation.number if n == 0 else self.number("output", equation.number, n),
            size == 1,
            whole=is_whole(dtype) or (name in _WHOLE and all(value.whole for value in inputs)),
            positive=kept or name in POSITIVE or dtype.startswith(("bool", "uint")),
            **_followed(inputs),
        )
        # No gradient goes through whole numbers. A question about the batch may have one answer in all micro-batches.
        asks = (dtype == "bool" or name in _STEPS) and place is None
        asks = asks and any(symbol.kind == "mixed" for symbol in symbols_of(found))
        return found.but(free=found.free or is_whole(dtype), unsure=found.unsure or asks)


def _followed(values: Sequence[Value]) -> dict[str, Any]:
    """What a number inherits from those that it follows from."""
    found: dict[str, Any] = {
        name: any(getattr(value, name) for value in values) for name in ("fresh", "unsure", "local")
    }
    found |= {
        name: frozenset().union(*(getattr(value, name) for value in values)) for name in ("sums", "doubts", "state")
    }
    return found | {"free": all(value.free for value in values)}


def _is_place(term: Term) -> bool:
    return any(symbol.kind == "position" for symbol, _ in term.factor)


def _unknown(walk: Interpreter, equation: Equation, values: list[Value]) -> list[Known]:
    """A primitive without a rule: what follows from no row stays so."""
    alike = equation.outputs == equation.other_outputs and (values or not walk.split)
    if alike and all(value.is_shared for value in values):
        return [walk.made(equation, values, SHARED, None, n) for n in range(len(equation.outputs))]
    raise CannotTell(equation.name)


def _carried(lost: list[Lost], values: list[Any], equation: Equation) -> Lost:
    """What an operation makes of what is lost: is it certain that rows are mixed in a way that nothing takes back?"""
    first, name = min(lost, key=lambda each: (each.how == "unknown", each.early)), equation.name
    meets = len(lost) > 1 or any(isinstance(value, Value) and value.own for value in values)
    linear = name in _LINEAR or (name in _BILINEAR and not meets)
    fewer = _growing(equation.traced, "invars") > _growing(equation.traced, "outvars")
    hows = [each.how for each in lost]
    how, certain = first.how, first.certain
    if how == "order":
        how, certain = _of_order(name, meets and name not in ("concatenate", "gather", "sort"), linear, fewer)
    elif how == "some" and len(lost) > 1:  # what is missing in one may be in the other
        how, certain = ("order", False) if name == "concatenate" else ("mixed", not linear)
    elif "mixed" in hows:
        how, certain = "mixed", not linear or max(each.certain for each in lost)
    elif how == "pairs":
        masked = "unsure" in hows and name in ("mul", "select_n")
        how, certain = _of_pairs(name, certain, masked, linear, fewer)
    return first._replace(how=how, certain=certain)


def _of_order(name: str, meets: bool, linear: bool, fewer: bool) -> tuple[str, bool]:
    """Rows in another order: sums over them are what they were, and rows that meet others, or some of them, are not."""
    if meets:
        return "mixed", not linear
    return ("mixed", name in _PICKS or not linear) if fewer else ("order", False)


def _of_pairs(name: str, certain: bool, masked: bool, linear: bool, fewer: bool) -> tuple[str, bool]:
    """An entry for each pair of rows: a diagonal may be picked, or masked and summed."""
    if fewer and name in _PICKS:
        return "unsure", False
    return "mixed" if fewer else "pairs", not masked and (certain or not linear)


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
    number = a.number if a.number == b.number else walk.number("either", a.number, b.number)
    both |= {name: getattr(a, name) and getattr(b, name) for name in ("scalar", "position", "whole", "positive")}
    return Value(a.terms | b.terms, place, number, **both, **_followed([a, b]))


_LAYOUT = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
"""What a single row needs none of."""


def does_alike(first: Any, second: Any, third: Any, rows: tuple[int, int]) -> bool:
    """Whether a loss does the same for other rows.

    Its operations are the same, and so are its numbers, or they go with the power of the rows that they go with from
    the first to the second.
    """
    traces = [list(_done(closed)) for closed in (first, second, third)]
    if len({len(trace) for trace in traces}) > 1:
        return False
    for one, two, three in zip(*traces):
        if isinstance(one, str) or isinstance(three, str):
            if one != three:
                return False
            continue
        degree = exponent(one, two, 2)
        expected = one if degree is None else one * (rows[1] / rows[0]) ** float(degree)
        if degree is not None and three != expected and abs(three - expected) > 1e-5 * abs(expected):
            return False
    return True


def _done(closed: Any) -> Iterator[Any]:
    """The names of all operations of a jaxpr, and the numbers that are written down in it."""
    jaxpr, consts = _opened(closed)
    for const in consts:
        yield from _real(const)
    for equation in jaxpr.eqns:
        if equation.primitive.name in _LAYOUT:
            continue
        yield equation.primitive.name
        for variable in equation.invars:
            yield from _real(variable.val) if isinstance(variable, Literal) else ()
        for name, value in sorted(equation.params.items()):
            if name in ("y", "k", "reverse", "exponent"):
                yield float(value) if isinstance(value, int | float) else str(value)
            for each in value if isinstance(value, tuple | list) else [value]:
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from _done(each)


def _real(value: Any) -> list[float]:
    kinds = jnp.floating, jnp.integer, jnp.bool_
    if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
        return []
    if not any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds):
        return []
    number = float(np.asarray(value).item())
    return [number] if np.isfinite(number) else []


def _opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _is_number(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf" or str(np.asarray(value).dtype) == "bfloat16"
    except TypeError:
        return False


def is_whole(dtype: Any) -> bool:
    """Whether numbers of this dtype are whole."""
    return str(dtype).startswith(("bool", "int", "uint"))


def _static(params: dict[str, Any]) -> Any:
    """Parameters as something that can be compared."""
    return tuple(sorted((name, repr(value)) for name, value in params.items() if name != "sharding"))


_JAX = os.path.dirname(jax.__file__)
_OWN = os.path.dirname(os.path.dirname(__file__))
_PACKAGES = f"{os.sep}site-packages{os.sep}"


def is_ours(path: str) -> bool:
    """Whether this is a module of JAX, or of this package."""
    return path.startswith((f"{_JAX}{os.sep}", f"{_OWN}{os.sep}"))


def _frames(info: Any) -> list[Any]:
    """The calls that led to an operation, the innermost first, without JAX' own."""
    frames = getattr(getattr(info, "traceback", None), "frames", None) or []
    return [frame for frame in frames if not is_ours(frame.file_name)]


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
