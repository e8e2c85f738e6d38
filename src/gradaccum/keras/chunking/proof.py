"""The proof of a chunked layer: a few rows of a call, at once and in micro-batches, and what is said of them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.numpy_arrays import relative_error
from gradaccum.core.proof import Comparison, Outcome
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import even_sizes
from gradaccum.core.ways import Way
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import assign, is_float
from gradaccum.keras.batch_norm import BatchNorm
from gradaccum.keras.chunking.body import Body
from gradaccum.keras.loss import as_array
from gradaccum.keras.proof import Draws, StepRunner, held, mixing_layers, parts_of, precision_of, recorded_calls


class ChunkTrial(StepRunner):
    """A few rows of a call, with the variables it reads and the gradients that its outputs are given.

    While a graph is traced there are no rows to look at: it makes some up, and values for variables that have none.
    """

    def __init__(self, body: Body, rows: int, size: int, passes: Any, batch_norm: BatchNorm, unknown: int) -> None:
        self.precision, self._tolerance = precision_of(body.layer), rounding(precision_of(body.layer))
        self.body, self.rows, self.size, self.passes, self.batch_norm = body, rows, size, passes, batch_norm
        self.draws = Draws()  # not told of
        self._random = np.random.default_rng(0)
        self._layers = [body.layer, *private.layers_in(body.layer)]
        self.real = backends.running().known([*body.tensors, *body.shared])
        if self.real:
            places = np.linspace(0, int(body.tensors[0].shape[0]) - 1, rows).astype(int)
            self.tensors = [ops.take(tensor, places, axis=0) for tensor in body.tensors]
            self.shared = [ops.stop_gradient(scalar) for scalar in body.shared]
        else:
            shapes = [[unknown if n is None else n for n in tuple(tensor.shape)[1:]] for tensor in body.tensors]
            self.tensors = [self._made_up((rows, *shape), t.dtype) for shape, t in zip(shapes, body.tensors)]
            self.shared = [self._made_up((), scalar.dtype) for scalar in body.shared]
        moved = {id(variable) for variable in body.state.variables}
        self.weights = [v for v in body.read if v.trainable and id(v) not in moved and is_float(v)]
        trained = {id(variable) for variable in self.weights}
        self.values = [self._value(variable) for variable in self.weights]
        self.given = [(v, self._value(v)) for v in [*body.read, *body.state.variables] if id(v) not in trained]
        self.places = [n for n, tensor in enumerate(self.tensors) if is_float(tensor)]
        self._moved: dict[str, np.ndarray] = {}

    def _made_up(self, shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = keras.backend.standardize_dtype(dtype)
        array: Any = np.ones(shape, bool)
        if dtype == "bool" and len(shape) > 1:  # a mask: rows of different lengths
            lengths = 1 + np.arange(shape[0])[:, None] % shape[1]
            shown = (np.arange(shape[1]) < lengths).reshape(*shape[:2], *[1] * (len(shape) - 2))
            array = np.broadcast_to(shown, shape)
        elif "int" in dtype:
            tables = [layer.input_dim for layer in self._layers if isinstance(layer, keras.layers.Embedding)]
            array = self._random.integers(0, min(tables, default=2), shape)
        elif dtype != "bool":
            array = self._random.uniform(0.0 if shape else 0.5, 1.0, shape)
        return ops.convert_to_tensor(array, dtype)

    def _value(self, variable: Any) -> Any:
        if private.has_value(variable):
            return ops.copy(ops.convert_to_tensor(variable.value))
        shape, dtype = tuple(variable.shape), variable.dtype
        if not is_float(variable):
            return ops.zeros(shape, dtype)
        if len(shape) < 2:
            return ops.convert_to_tensor(self._random.uniform(0.5, 1.5, shape), dtype)
        return ops.convert_to_tensor(self._random.normal(0, max(1, int(np.prod(shape[:-1]))) ** -0.5, shape), dtype)

    def judge(self) -> str:
        """Raise what the passes make different. Returns why it isn't known, if so."""
        sizes = even_sizes(self.rows, self.size)
        comparison = Comparison(self, [(range(self.rows), sizes)], "raise")
        before = self._attributes()
        _ = comparison.large
        between, moved = self._attributes(), self._moved
        comparison.differences()
        in_parts, left = self._moved, []
        for key, (_, tensors) in self._attributes().items():
            if [*map(id, tensors)] != [*map(id, between.get(key, ("", []))[1])]:
                left.append(f"{key[1]}.{key[2]}")
        for layer in self._layers:
            vars(layer).update({name: value for (key, _, name), (value, _) in before.items() if key == id(layer)})
        if doubt := self.doubt(comparison):
            return doubt
        if wrong := comparison.wrong:
            self._raise(sizes, max(difference.error for difference in wrong))
        far = [n for n, v in moved.items() if relative_error(in_parts.get(n, v), v) > 100 * self.tolerance]
        self._warn(far, left)
        return ""

    def _attributes(self) -> dict[tuple[int, str, str], tuple[Any, list[Any]]]:
        """The attributes of layers that hold tensors, and these tensors."""
        found = {}
        for layer in self._layers:
            for name, value in vars(layer).items():
                is_public = name[0] != "_" and isinstance(value, (list, tuple, dict))
                flat = tree.flatten(value) if is_public else [value]
                tensors = [leaf for leaf in flat if ops.is_tensor(leaf)]
                if tensors:
                    found[id(layer), layer.name, name] = value, tensors
        return found

    @contextlib.contextmanager
    def moved(self, seed: int, *, far: bool = False) -> Iterator[ChunkTrial]:
        there = copy.copy(self)
        there.values = self.moved_values(self.values, seed, far=far)
        yield there

    def run(self, way: Way | None) -> Outcome:
        """Outputs, and gradients of weights and inputs."""
        weights, backend = len(self.weights), backends.running()

        def loss(values: list[Any]) -> Any:
            tensors = list(self.tensors)
            for place, value in zip(self.places, values[weights:]):
                tensors[place] = value
            with keras.StatelessScope([*zip(self.weights, values), *self.given]) as scope:
                body = self.body.again(tensors, self.shared, self.batch_norm)
                if way is not None:
                    outputs = self.passes(body, self.size, 0)
                else:
                    outputs, moved_to, _ = body.run(body.tensors)
                    assign(body.state.variables, moved_to)
            self.body.refuse_outer(backend.outer_tensors(outputs, values, self.body.layer))
            moved = {v.path: scope.get_current_value(v) for v in body.state.averaged}
            pulls = np.random.default_rng(0)
            pulled = [
                ops.sum(output * ops.convert_to_tensor(pulls.normal(size=tuple(output.shape)), output.dtype))
                for output in outputs
                if is_float(output)
            ]
            return sum(pulled, start=ops.zeros((), pulled[0].dtype if pulled else None)), (outputs, moved)

        def outcome(values: list[Any]) -> Any:
            (_, (outputs, moved)), gradients = backend.value_and_gradients(loss, values)
            return outputs, gradients, moved

        inputs = [self.tensors[place] for place in self.places]
        with held():  # the second pass, too
            outputs, gradients, moved = backend.compiled(outcome)([*self.values, *inputs])
        self._moved = {name: as_array(value) for name, value in moved.items()}
        found = [None if gradient is None else as_array(gradient) for gradient in gradients]
        return Outcome(
            {f"output {n}": as_array(output) for n, output in enumerate(outputs)},
            {f"gradient {n}": gradient for n, gradient in enumerate(found)},
        )

    def _warn(self, far: list[str], left: list[str]) -> None:
        """Of variables that micro-batches move elsewhere, and attributes of layers in which passes leave tensors."""
        if far:
            warnings.warn(
                f"These variables of {self.body.name_inside} end up at the mean of where its micro-batches move them, "
                f"which is not where all rows at once move them: {', '.join(map(repr, far))}.",
                stacklevel=7,
            )
        if left:
            warnings.warn(
                f"{self.body.name} keeps tensors of its forward pass as attributes ({', '.join(map(repr, left))}). In "
                "micro-batches only the last one's are left, without a gradient. Return them, with a row for every "
                "row, and reduce over the rows outside of the layer.",
                stacklevel=7,
            )

    def _raise(self, sizes: list[int], worst: float) -> None:
        parts = parts_of((range(self.rows), sizes))
        message = (
            f"{self.body.name} gives {self.rows} rows{'' if self.real else ' of random numbers'} other outputs or "
            f"gradients in micro-batches of {', '.join(map(str, sizes))} than at once (relative error {worst:.3g}, "
            f"{self.tolerance:.3g} allowed)."
        )
        with contextlib.suppress(Exception):  # it can't be run piece by piece
            calls, *part_calls = (self._calls(rows) for rows in (np.arange(self.rows), *parts))
            causes = mixing_layers(self.body.layer, calls, part_calls, parts, self.tolerance)
            message = "\n".join([message, *(cause.message for cause in causes)])
        raise NotEquivalentError(message)

    def _calls(self, rows: np.ndarray) -> Any:
        """What goes into and comes out of each layer."""
        layer, tensors = self.body.layer, [ops.take(tensor, rows, axis=0) for tensor in self.tensors]
        # What is exact over all rows isn't over a few: there it isn't what differs.
        body = self.body.again(tensors, self.shared, "frozen" if self.body.batch_norm == "exact" else self.batch_norm)
        scope = keras.StatelessScope([*zip(self.weights, self.values), *self.given])
        with scope, held(), recorded_calls(layer, body.call) as calls:
            body.call = layer.call
            body.run(tensors)
        return calls
