"""Follows the rows through a loss that was traced for two numbers of rows, equation by equation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from gradaccum.jax.loss.algebra import common_place
from gradaccum.jax.loss.values import COUNT, ONE, CannotTell, Known, MixesRows, Place, Source, Symbol, Term, exponent

__all__ = [
    "CALLS", "CONSTANT", "WITH_JAXPRS", "Equation", "Lost", "Rule", "Value", "Walk", "is_ours", "is_whole", "joined",
    "line",
]  # fmt: skip


class Lost(NamedTuple):
    """A number that is not followed any further.

    Attributes:
        mixed: Whether it takes several rows to know, not each by itself; else nothing is known.
        source: What has computed it.
        message: What is not known.
        origin: The number of the first sum over rows that it comes from.
        order: How early in the loss it was computed.
    """

    mixed: bool
    source: Source
    message: str = ""
    origin: Any = None
    order: int = 0


Value = Known | Lost
_LATE = 1 << 40
CONSTANT = frozenset([Term(False)])


class Equation(NamedTuple):
    """One operation, at both numbers of rows.

    Attributes:
        name: Of its primitive.
        params, other_params: Its parameters.
        shapes: Of its inputs.
        outputs, other_outputs: The shapes of its outputs.
        source: Who asked for it.
        number: Equal for operations that compute the same.
        dtypes: Of inputs and outputs.
        traced: As JAX has it.
    """

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


Rule = Callable[["Walk", Equation, list[Any]], list[Value]]


class Walk:
    """Two traces of a loss, side by side.

    Args:
        rows: The numbers of rows that it was traced for.
        rules: What is known of each primitive.
    """

    def __init__(self, rows: tuple[int, int], rules: dict[str, Rule]) -> None:
        self.rows, self.rules = rows, rules
        self.ratio = rows[1] / rows[0]
        self._numbers: dict[Any, int] = {}
        self.callers: list[tuple[str, Any]] = []
        """The functions that are being walked through: their names, and who has called them."""
        self.is_derivative = False
        """Whether it is a derivative that is walked through."""
        self.whole_of: dict[Any, Any] = {}
        """Of a sum over some axes, what it is a part of the sum of."""

    def number(self, *key: Any) -> int:
        """One number for all that is computed alike."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, first: Any, second: Any, consts: tuple[Any, Any], inputs: Sequence[Value]) -> list[Value]:
        """What is known of a jaxpr's outputs.

        Raises:
            CannotTell: The traces do different things.
        """
        if [e.primitive.name for e in first.eqns] != [e.primitive.name for e in second.eqns]:
            raise CannotTell("other operations")
        known: dict[Any, Value] = dict(zip(first.invars, inputs, strict=True))
        for variable, a, b in zip(first.constvars, consts[0], consts[1], strict=True):
            known[variable] = self.constant(a, b)
        for one, other in zip(first.eqns, second.eqns):
            values = [self._read(known, *pair) for pair in zip(one.invars, other.invars, strict=True)]
            known.update(zip(one.outvars, self._outputs(one, other, values), strict=True))
        return [self._read(known, *pair) for pair in zip(first.outvars, second.outvars, strict=True)]

    def _read(self, known: dict[Any, Value], variable: Any, other: Any) -> Value:
        if isinstance(variable, Literal):
            return self.constant(variable.val, other.val)
        return known[variable]

    def constant(self, first: Any, second: Any) -> Value:
        """What is known of an array that was written down."""
        shapes = np.shape(first), np.shape(second)
        number = self.number("constant", id(first))
        if shapes[0] != shapes[1]:
            place = self.place_by_shapes(*shapes)
            concrete = not isinstance(first, jax.core.Tracer)
            same = concrete and np.asarray(first).size and bool((np.asarray(first) == np.ravel(first)[0]).all())
            symbol = Symbol(number, "position", True, True, Source("constant"))
            own = Term(False) if same else Term(True, frozenset([(symbol, Fraction(1))]))
            return Known(frozenset([own]), place, number)
        if isinstance(first, jax.core.Tracer) or not _is_number(first) or np.size(first) != 1:
            return Known(CONSTANT, None, number, np.size(first) == 1, whole=is_whole(getattr(first, "dtype", None)))
        return self.of_values(np.asarray(first).item(), np.asarray(second).item())

    def of_values(self, first: Any, second: Any) -> Known:
        """What is known of a number that is known at both numbers of rows."""
        number = self.number("value", repr(first), repr(second))
        degree = exponent(first, second, self.ratio) if first == first else Fraction(0)
        if first == 0 == second:
            terms: frozenset[Term] = frozenset()
        elif degree is None:
            symbol = Symbol(number, "count", True, True, Source("constant"))
            terms = frozenset([Term(False, frozenset([(symbol, Fraction(1))]))])
        else:
            terms = frozenset([Term(False, frozenset([(COUNT, degree)]) if degree else ONE)])
        whole = all(not isinstance(value, float) or value.is_integer() for value in (first, second))
        return Known(terms, None, number, True, (first, second), whole=whole)

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

    def _outputs(self, one: Any, other: Any, values: list[Value]) -> list[Value]:
        name = one.primitive.name
        equation = Equation(
            name,
            one.params,
            other.params,
            [tuple(getattr(v.aval, "shape", ())) for v in one.invars],
            [tuple(getattr(v.aval, "shape", ())) for v in one.outvars],
            [tuple(getattr(v.aval, "shape", ())) for v in other.outvars],
            Source(name, called_from(one.source_info, self.callers)),
            None,
            (
                [getattr(v.aval, "dtype", None) for v in one.invars],
                [getattr(v.aval, "dtype", None) for v in one.outvars],
            ),
            (one, other),
        )
        if name not in WITH_JAXPRS:
            lost = [value for value in values if isinstance(value, Lost)]
            zero = name == "mul" and any(isinstance(value, Known) and not value.terms for value in values)
            if lost and not zero:
                return [first_of(lost)] * len(one.outvars)
            if lost:
                return [next(value for value in values if isinstance(value, Known) and not value.terms)]
            number = self.number(name, _static(one.params), *(v.number for v in values if isinstance(v, Known)))
            equation = equation._replace(number=number)
        try:
            self._check_parameters(equation, values)
            found = self.rules.get(name, unknown)(self, equation, values)
            self._check_shapes(equation, found)
        except MixesRows:
            # What is but a pattern of rows by rows, as an identity matrix, is not what mixes them.
            pattern = not any(isinstance(v, Lost) or any(term.own for term in v.terms) for v in values)
            order = len(self._numbers) + pattern * _LATE
            return [Lost(True, equation.source, order=order)] * len(one.outvars)
        except CannotTell as error:
            return [Lost(False, equation.source, str(error))] * len(one.outvars)
        return found

    def _check_parameters(self, equation: Equation, values: list[Value]) -> None:
        """Numbers that an operation is given beside its inputs: powers, and where a slice begins and ends."""
        rows: Any = None
        if values and isinstance(values[0], Known):
            rows = values[0].place.axis if values[0].place is not None else None
        for name, value in equation.params.items():
            other: Any = equation.other_params.get(name)
            if name in _EXTENTS and isinstance(value, tuple):
                if isinstance(values[0], Known) and values[0].values is not None:
                    continue
                value, other = ([each for axis, each in enumerate(some) if axis != rows] for some in (value, other))
            elif name in _SHAPES or not isinstance(value, bool | int | float | str):
                continue
            if repr(value) != repr(other):  # NaN is not itself
                raise CannotTell(f"{name}={value} for {self.rows[0]} rows, {name}={other} for {self.rows[1]}")

    def _check_shapes(self, equation: Equation, found: list[Value]) -> None:
        """Where an array has rows, no other axis may grow with them."""
        for value, first, second in zip(found, equation.outputs, equation.other_outputs):
            if isinstance(value, Known) and value.place is not None:
                grown = [axis for axis, (a, b) in enumerate(zip(first, second)) if a != b]
                if set(grown) - {value.place.axis}:
                    raise CannotTell(f"shape {first} for {self.rows[0]} rows, {second} for {self.rows[1]}")

    def made(self, equation: Equation, inputs: Sequence[Known], terms: Any, place: Place | None, n: int = 0) -> Known:
        """What is known of an output that follows from these inputs."""
        size = int(np.prod(equation.outputs[n], dtype=np.int64))
        if place is not None and place.axis >= 0:
            size //= max(equation.outputs[n][place.axis], 1)
        return Known(
            terms,
            place,
            equation.number if n == 0 else self.number("output", equation.number, n),
            size == 1,
            fresh=any(value.fresh for value in inputs),
            free=all(value.free for value in inputs),
            sums=frozenset().union(*(value.sums for value in inputs)),
            whole=self._is_whole(equation, inputs, n),
            doubts=frozenset().union(*(value.doubts for value in inputs)),
            state=frozenset().union(*(value.state for value in inputs)),
        )

    def _is_whole(self, equation: Equation, inputs: Sequence[Known], n: int) -> bool:
        return is_whole(equation.dtypes[1][n]) or (equation.name in _WHOLE and all(value.whole for value in inputs))


CALLS = (
    "pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat",
    "remat2", "checkpoint",
)  # fmt: skip
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
    "rev", "scatter-add", "select_n", "slice", "sort", "square", "squeeze", "stop_gradient", "sub", "transpose",
}  # fmt: skip
"""Of whole numbers, they give whole numbers."""
WITH_JAXPRS = {*CALLS, "scan", "while", "cond"}
"""Primitives that hold jaxprs: their rules take what is lost, too."""


def unknown(walk: Walk, equation: Equation, values: list[Known]) -> list[Value]:
    """A primitive without a rule: what hangs on no row stays so."""
    if all(value.is_shared and value.place is None for value in values) and equation.outputs == equation.other_outputs:
        return [walk.made(equation, values, CONSTANT, None, n) for n in range(len(equation.outputs))]
    raise CannotTell(equation.name)


def first_of(lost: list[Lost]) -> Lost:
    """The one that says most: what mixes rows, as early as can be."""
    return min(lost, key=lambda each: (not each.mixed, each.order))


def joined(walk: Walk, a: Value, b: Value) -> Value:
    """What is known of a number that is one of both."""
    if a == b:
        return a
    if isinstance(a, Lost) or isinstance(b, Lost):
        return first_of([v for v in (a, b) if isinstance(v, Lost)])
    try:
        place = common_place([a, b])
    except MixesRows:
        return Lost(True, Source("branches"))
    return Known(
        a.terms | b.terms,
        place,
        a.number if a.number == b.number else walk.number("either", a.number, b.number),
        a.scalar and b.scalar,
        a.values if a.values == b.values else None,
        a.position and b.position,
        a.guard if a.guard == b.guard else None,
        a.fresh or b.fresh,
        a.free and b.free,
        a.sums | b.sums,
        whole=a.whole and b.whole,
        doubts=a.doubts | b.doubts,
        state=a.state | b.state,
    )


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
    traceback = getattr(info, "traceback", None)
    frames = getattr(traceback, "frames", None) or []
    return [frame for frame in frames if not is_ours(frame.file_name)]


def called_from(info: Any, callers: list[tuple[str, Any]]) -> Any:
    """Who has asked for an operation inside of functions that JAX may have traced for somebody else before.

    Args:
        info: Of the operation.
        callers: The names of the functions, and who has called them.
    """
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
