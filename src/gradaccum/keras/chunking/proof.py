"""Whether a layer gives the same for a few rows at once and in micro-batches, and which layer inside does not."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.numpy_arrays import relative_error
from gradaccum.core.rounding import last_place, rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import backends
from gradaccum.keras.batch_norm import BatchNorm
from gradaccum.keras.chunking.body import Body, OuterTensorError
from gradaccum.keras.equivalence import as_array, held, mixing_layers, precision_of, recorded_calls
from gradaccum.keras.loss import value_and_gradients
from gradaccum.keras.private import has_value, layers_in, outside_of_scopes

__all__ = ["Proof"]

logger = logging.getLogger("gradaccum")

Passes = Callable[[Body, int, int], list[Any]]
"""`passes(body, rows of a micro-batch, keep)`, the tensors in its outputs."""
ROWS = 6
"""Rows that are looked at, at most: twice what a micro-batch may hold, where that is less."""
UNKNOWN = (8, 64)
"""What dimensions other than the rows are tried with, where they aren't known while a graph is traced."""
_SMALL = 1e-2
"""Gradients that are smaller than the largest by this factor are measured by that one: else all of it is rounding."""


class _Outcome(NamedTuple):
    """Of a few rows: the outputs, the gradients of weights and inputs, and what the forward pass moved, by name."""

    outputs: list[np.ndarray]
    gradients: list[np.ndarray]
    moved: dict[str, np.ndarray]


class Proof:
    """Compares what a few rows of a call give at once and in micro-batches: outputs, gradients, moved variables.

    It happens at the first call in training, and at the first outside of it. Random numbers are held, nothing is moved,
    and BatchNormalization, which has a warning of its own, normalises by its moving statistics. While a graph is
    traced there are no rows to look at: it makes some up, and values for variables that have none there.
    """

    def __init__(self) -> None:
        self._proven: set[Any] = set()
        self._told = False

    def first(self, body: Body, micro_batch_size: int, passes: Passes) -> None:
        """Prove a call, unless one like it has been looked at.

        Args:
            body: The call, which has run.
            micro_batch_size: Rows of its micro-batches.
            passes: How it ran in these.

        Raises:
            NotEquivalentError: Outputs or gradients differ; the message names the layer.
        """
        kind = body.kind
        if kind in self._proven:
            return
        self._proven.add(kind)
        where = backends.running().unprovable()
        if where:
            logger.warning(
                "Whether %s gives the outputs and gradients of all rows at once is not proven %s. `verify(*inputs)` "
                "proves it.",
                body.name_inside,
                where,
            )
            return
        few = max(2, min(ROWS, 2 * micro_batch_size))
        try:
            doubt = self._compare(
                body, few, (few + 1) // 2, passes, "micro" if body.batch_norm == "exact" else "frozen"
            )
        except (NotEquivalentError, OuterTensorError):
            raise
        except Exception as error:  # a layer for one number of rows, or that checks what is in them
            doubt = f"{type(error).__name__}: {error}".splitlines()[0]
        if doubt and not self._told:
            self._told = True
            warnings.warn(
                f"Whether {body.name_inside} gives the outputs and gradients of all rows at once could not be proven: "
                f"a few rows can't be evaluated so ({doubt}). `verify(*inputs)` tells with inputs of yours, and "
                "chunked(..., verify=False) leaves the proof out.",
                stacklevel=5,
            )

    def demanded(self, body: Body, rows: int, size: int, passes: Passes) -> None:
        """Prove a call with its own first rows. What isn't exact of BatchNormalization counts.

        Raises:
            NotEquivalentError: Outputs or gradients differ.
        """
        doubt = self._compare(body, rows, size, passes, "frozen" if body.batch_norm == "frozen" else "micro")
        if doubt:
            raise ValueError(f"{body.name} can't be verified: {doubt}.")

    def _compare(self, body: Body, few: int, size: int, passes: Passes, batch_norm: BatchNorm) -> str:
        """Raises what differs. Returns why it isn't known, if it isn't."""
        errors: list[Exception] = []
        with backends.running().at_once(), outside_of_scopes():
            for unknown in UNKNOWN:
                trial = _Trial(body, few, batch_norm, unknown)
                try:
                    doubt = trial.judge(size, passes)
                except (NotEquivalentError, OuterTensorError):
                    raise
                except Exception as error:
                    errors.append(error)
                    if trial.certain:
                        break
                else:
                    if doubt:
                        return doubt
                    self._say(trial)
                    return ""
        raise errors[0]

    def _say(self, trial: _Trial) -> None:
        name = trial.body.name_inside
        if trial.astray:
            warnings.warn(
                f"These variables of {name} move to the mean of where its micro-batches take them, which is not where "
                f"all rows at once take them: {', '.join(map(repr, trial.astray))}.",
                stacklevel=6,
            )
        if trial.aside:
            warnings.warn(
                f"{name[0].upper()}{name[1:]} keeps tensors of its forward pass as attributes ("
                f"{', '.join(map(repr, trial.aside))}). In micro-batches these are the last one's alone, and without a "
                "gradient. Return them, with a row for every row, and reduce over the rows outside.",
                stacklevel=6,
            )


class _Trial:
    """A few rows of a call, known or made up.

    Attributes:
        certain: Whether the shapes of the call were known.
        astray: Variables that micro-batches move elsewhere.
        aside: Attributes of layers in which a forward pass leaves tensors.
    """

    def __init__(self, body: Body, rows: int, batch_norm: BatchNorm, unknown: int) -> None:
        self.body, self.rows, self.batch_norm = body, rows, batch_norm
        self._random = np.random.default_rng(0)
        self.astray: list[str] = []
        self.aside: list[str] = []
        self.certain = all(None not in tuple(tensor.shape)[1:] for tensor in body.tensors)
        tables = [layer for layer in self._layers() if isinstance(layer, keras.layers.Embedding)]
        self._ids = min((table.input_dim for table in tables), default=2)
        self.real = backends.running().known([*body.tensors, *body.shared])
        if self.real:
            count = int(body.tensors[0].shape[0])
            places = np.linspace(0, count - 1, rows).astype(int)
            self.tensors = [ops.take(tensor, places, axis=0) for tensor in body.tensors]
            self.shared = [ops.stop_gradient(scalar) for scalar in body.shared]
        else:
            shapes = [(rows, *(unknown if n is None else n for n in tuple(t.shape)[1:])) for t in body.tensors]
            self.tensors = [self._made_up(shape, tensor.dtype) for shape, tensor in zip(shapes, body.tensors)]
            self.shared = [self._made_up((), scalar.dtype) for scalar in body.shared]
        moved = {id(variable) for variable in body.state.variables}
        self.weights = [v for v in body.read if v.trainable and id(v) not in moved and _is_float(v.dtype)]
        trained = {id(variable) for variable in self.weights}
        self.others = [v for v in [*body.read, *body.state.variables] if id(v) not in trained]
        self.values = [self._value(variable) for variable in self.weights]
        self.given = [(variable, self._value(variable)) for variable in self.others]
        self.places = [n for n, tensor in enumerate(self.tensors) if _is_float(tensor.dtype)]

    def _layers(self) -> list[Any]:
        return [self.body.layer, *layers_in(self.body.layer)]

    def _made_up(self, shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = keras.backend.standardize_dtype(dtype)
        if dtype == "bool":  # a mask: rows of different lengths
            length = shape[1] if len(shape) > 1 else 1
            lengths = 1 + np.arange(shape[0]) % length if shape else np.ones(())
            array = np.ones(shape, bool)
            if len(shape) > 1:
                array &= (np.arange(length) < lengths[:, None]).reshape(shape[0], length, *[1] * (len(shape) - 2))
        elif "int" in dtype:
            array = self._random.integers(0, self._ids, shape)
        else:
            array = self._random.uniform(0.0 if shape else 0.5, 1.0, shape)
        return ops.convert_to_tensor(array, dtype)

    def _value(self, variable: Any) -> Any:
        if has_value(variable):
            return ops.copy(ops.convert_to_tensor(variable.value))
        shape, dtype = tuple(variable.shape), variable.dtype
        if not _is_float(dtype):
            return ops.zeros(shape, dtype)
        if len(shape) < 2:
            return ops.convert_to_tensor(self._random.uniform(0.5, 1.5, shape), dtype)
        spread = max(1, int(np.prod(shape[:-1]))) ** -0.5
        return ops.convert_to_tensor(self._random.normal(0, spread, shape), dtype)

    def judge(self, size: int, passes: Passes) -> str:
        """Raise what `passes` makes different in micro-batches of so many rows. Returns why it isn't known, if so."""
        before = self._attributes()
        whole = self._outcome(self._whole)
        between = self._attributes()

        def in_parts(body: Body) -> list[Any]:
            return passes(body, size, 0)

        small = self._outcome(in_parts)
        for (key, layer, name), (_, tensors) in self._attributes().items():
            if not _same(tensors, between.get((key, layer, name), (None, []))[1]):
                self.aside.append(f"{layer}.{name}")
        self._put_back(before)
        tolerance = rounding(precision_of(self.body.layer))
        errors = self._errors(small, whole)
        if any(not error <= tolerance for error in errors):
            if any(not error <= tolerance for error in self._errors(self._outcome(self._whole), whole)):
                return "it draws random numbers that don't come from keras.random, or changes with every call"
            # What cancels out is nothing but rounding, of larger terms than can be seen, and other ones in each way.
            moves = zip(*(self._moves(run, found) for run, found in ((self._whole, whole), (in_parts, small))))
            allowed = [max(tolerance, *(10 * move for move in both)) for both in moves]
            wrong = [error for error, most in zip(errors, allowed) if not error <= most]
            if wrong:
                self._raise(size, max(wrong), tolerance)
        for name, value in whole.moved.items():
            if relative_error(small.moved.get(name, value), value) > 100 * tolerance:
                self.astray.append(name)
        return ""

    def _attributes(self) -> dict[tuple[int, str, str], tuple[Any, list[Any]]]:
        """The attributes of layers that hold tensors, and these tensors."""
        found = {}
        for layer in self._layers():
            for name, value in vars(layer).items():
                if (not name.startswith("_") and isinstance(value, (list, tuple, dict))) or ops.is_tensor(value):
                    tensors = [leaf for leaf in tree.flatten(value) if ops.is_tensor(leaf)]
                    if tensors:
                        found[id(layer), layer.name, name] = value, tensors
        return found

    def _put_back(self, before: dict[tuple[int, str, str], tuple[Any, list[Any]]]) -> None:
        for layer in self._layers():
            for (key, _, name), (value, _) in before.items():
                if key == id(layer):
                    vars(layer)[name] = value

    def _whole(self, body: Body) -> list[Any]:
        result = body.run(body.tensors)
        for variable, value in zip(body.state.variables, result.values):
            variable.assign(value)
        return result.outputs

    def _outcome(self, run: Callable[[Body], list[Any]], values: list[Any] | None = None) -> _Outcome:
        """What `run` makes of the call with these rows."""
        weights = len(self.weights)

        def loss(values: list[Any]) -> Any:
            tensors = list(self.tensors)
            for place, value in zip(self.places, values[weights:]):
                tensors[place] = value
            mapping = [*zip(self.weights, values), *self.given]
            with keras.StatelessScope(mapping) as scope:
                body = self.body.again(tensors, self.shared, self.batch_norm)
                outputs = run(body)
            self.body.refuse_outer(backends.running().outer_tensors(outputs, values, self.body.layer))
            moved = {v.path: scope.get_current_value(v) for v in body.state.averaged}
            pulls = np.random.default_rng(0)
            pulled = [
                ops.sum(output * ops.convert_to_tensor(pulls.normal(size=tuple(output.shape)), output.dtype))
                for output in outputs
                if _is_float(output.dtype)
            ]
            return sum(pulled, start=ops.zeros((), pulled[0].dtype if pulled else None)), (outputs, moved)

        def outcome(values: list[Any]) -> Any:
            (_, (outputs, moved)), gradients = value_and_gradients(loss, values, has_aux=True)
            return outputs, gradients, moved

        values = [*(self.values if values is None else values), *(self.tensors[place] for place in self.places)]
        with held():  # the second pass, too
            outputs, gradients, moved = backends.running().compiled(outcome)(values)
        return _Outcome(
            list(map(as_array, outputs)),
            [np.zeros(1) if gradient is None else as_array(gradient) for gradient in gradients],
            {name: as_array(value) for name, value in moved.items()},
        )

    def _errors(self, one: _Outcome, other: _Outcome) -> list[float]:
        """Of each output and of each gradient."""
        floor = _SMALL * max((float(np.abs(g[np.isfinite(g)]).max(initial=0)) for g in other.gradients), default=0.0)
        errors = [*map(relative_error, one.outputs, other.outputs)]
        return errors + [relative_error(a, b, floor) for a, b in zip(one.gradients, other.gradients)]

    def _moves(self, run: Callable[[Body], list[Any]], found: _Outcome) -> list[float]:
        """How far each output and each gradient moves with weights that differ in the last place."""
        unit, random = last_place(precision_of(self.body.layer)), np.random.default_rng(0)

        def nearby(value: Any) -> Any:
            signs = random.choice([-1.0, 1.0], tuple(value.shape))
            return value * ops.convert_to_tensor(1.0 + unit * signs, value.dtype)

        errors = self._errors(self._outcome(run, list(map(nearby, self.values))), found)
        return [error if np.isfinite(error) else 0.0 for error in errors]

    def _raise(self, size: int, worst: float, tolerance: float) -> None:
        sizes = even_sizes(self.rows, size)
        parts = np.split(np.arange(self.rows), np.cumsum(sizes)[:-1])
        said = ""
        with contextlib.suppress(Exception):  # it can't be run piece by piece
            calls, *part_calls = (self._calls(rows) for rows in (np.arange(self.rows), *parts))
            causes = mixing_layers(self.body.layer, calls, part_calls, parts, tolerance)
            said = "".join(f"\n{cause.message}" for cause in causes)
        raise NotEquivalentError(
            f"{self.body.name} gives {self.rows} rows{'' if self.real else ' of random numbers'} other outputs or "
            f"gradients in micro-batches of {', '.join(map(str, sizes))} than at once (relative error {worst:.3g}, "
            f"{tolerance:.3g} allowed).{said}"
        )

    def _calls(self, rows: np.ndarray) -> Any:
        """What goes into and comes out of each layer."""
        layer, tensors = self.body.layer, [ops.take(tensor, rows, axis=0) for tensor in self.tensors]
        mapping = [*zip(self.weights, self.values), *self.given]
        # What is exact over all rows isn't over a few: there it isn't what differs.
        body = self.body.again(tensors, self.shared, "frozen" if self.body.batch_norm == "exact" else self.batch_norm)
        with _own_call(layer, body.call), keras.StatelessScope(mapping), held(), recorded_calls(layer) as calls:
            body.call = layer.call
            body.run(tensors)
        return calls


@contextlib.contextmanager
def _own_call(layer: Any, call: Callable[..., Any]) -> Iterator[None]:
    own, vars(layer)["call"] = vars(layer).get("call"), call
    try:
        yield
    finally:
        vars(layer)["call"] = own


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs))


def _is_float(dtype: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(dtype))
