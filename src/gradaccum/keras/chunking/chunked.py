"""`chunked(encoder, 16)`: the outputs of all rows, in the memory of 16, for any loss.

```python
images, texts = gradaccum.keras.chunked(image_encoder, 16), gradaccum.keras.chunked(text_encoder, 16)
model = keras.Model([x, t], contrastive_loss(images(x), texts(t)))
model.fit([x, t], batch_size=1024)       # every row against 1023 others
```
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
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
from gradaccum.keras.backends.base import assign, has_rows, is_float, kind_of
from gradaccum.keras.batch_norm import BatchNorm, BatchNormOrExact, checked_batch_norm, during_micro_batch, warn
from gradaccum.keras.chunking.body import Body, Graph, OuterTensorError, exact_passes, two_passes
from gradaccum.keras.equivalence import Draws, StepRunner, held, mixing_layers, parts_of, precision_of, recorded_calls
from gradaccum.keras.loss import as_array
from gradaccum.schedule import checked_count

logger = logging.getLogger("gradaccum")

ROWS = 6
"""Rows that are looked at, at most: twice what a micro-batch may hold, where that is less."""
UNKNOWN = (8, 64)
"""What dimensions other than the rows are tried with, where they aren't known while a graph is traced."""


def chunked(
    layer_or_model: Any,
    micro_batch_size: int,
    *,
    keep: int = 0,
    batch_norm: BatchNormOrExact = "warn",
    verify: bool = True,
) -> Any:
    """Let a layer or model run each batch in micro-batches: the whole batch's outputs and gradients, for any loss.

    The first pass runs it over micro-batches and keeps only the outputs; the loss sees all of them; backward runs each
    micro-batch again and adds up

        dL/dp = sum_i (dL/d out_i) (d out_i/dp)        over micro-batches i, with dL/d out of the whole batch's loss

    so losses that compare rows (contrastive, triplet, Dice, balance losses) have the large batch's gradient in the
    memory of a few rows, at the cost of one more forward pass.

    Args:
        layer_or_model: A `keras.layers.Layer` or `keras.Model` whose outputs for a row depend on that row alone. It is
            changed in place, and its file doesn't record this: weights, names and `get_config()` stay its own. Its
            inputs and outputs are tensors with rows in their first dimension, in any structure.
        micro_batch_size: Rows that one forward and backward pass holds at most, on each device where the batch is
            spread over several.
        keep: Micro-batches that keep their activations and aren't run again, which saves time for memory.
        batch_norm: What `BatchNormalization` inside does, as in `micro_batched`: `"warn"` (as `"micro"`, with a
            warning), `"micro"`, `"pooled"` or `"frozen"`; or `"exact"`, mean and variance of all rows, as without
            chunks, in a functional or sequential model, which is cut at these layers. Their inputs stay in memory.
        verify: Prove the first call in training, and the first outside of it: the outputs and gradients of a few rows,
            at once and in micro-batches, by the same code. While TensorFlow or JAX traces a function, random numbers
            stand for the rows. A warning names what can't be compared.

    Returns:
        `layer_or_model`, with a method `verify(*inputs)` that proves the same at any time, on your rows.

    Raises:
        TypeError: `layer_or_model` is not a Keras layer, or a number is not an int. From a call: an input is not a
            tensor of the backend.
        ValueError: A number is too small, `batch_norm` is unknown, the layer is itself a BatchNormalization, or can't
            be cut for `"exact"`. From a call: inputs have different numbers of rows, an output lacks a row for each
            row, or the forward pass adds losses or assigns trainable variables.
        NotEquivalentError: From the first call, and from `verify`: a row's outputs depend on other rows. The message
            names the layer.

    Example:
        >>> import keras, numpy as np
        >>> encoder = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)])
        >>> model = chunked(encoder, 4)
        >>> def spread(y, outputs):                        # every row against every other
        ...     return keras.ops.logsumexp(keras.ops.matmul(outputs, keras.ops.transpose(outputs)))
        >>> model.compile(optimizer="sgd", loss=spread)
        >>> history = model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=10, verbose=0)
        >>> model.verify(np.ones((10, 3)))
    """
    if not isinstance(layer_or_model, keras.layers.Layer):
        raise TypeError(
            f"`layer_or_model` must be a keras.layers.Layer or keras.Model. Received: {layer_or_model!r} of type "
            f"{type(layer_or_model).__module__}.{type(layer_or_model).__qualname__}. For PyTorch modules use "
            "gradaccum.torch.chunked, for JAX functions gradaccum.jax.chunked."
        )
    if isinstance(layer_or_model, keras.layers.BatchNormalization):
        raise ValueError(
            "A BatchNormalization can't be chunked by itself, because it looks across the rows of its batch. "
            f"Received: {layer_or_model.name!r}. Chunk the layers around it, or the model that it is in."
        )
    checked_count(micro_batch_size, "micro_batch_size")
    checked_count(keep, "keep", least=0)
    checked_batch_norm(batch_norm)
    if batch_norm == "exact":
        if keep:
            raise ValueError(
                f'batch_norm="exact" runs every micro-batch again, so `keep` must be 0. Received: keep={keep}.'
            )
        if layer_or_model.built or not isinstance(layer_or_model, keras.Sequential):
            Graph(layer_or_model)  # refused here, if at all
    _Chunking(layer_or_model, micro_batch_size, keep, batch_norm, verify).install()
    return layer_or_model


class _Chunking:
    """Stands in for a layer's `call`."""

    def __init__(
        self, layer: Any, micro_batch_size: int, keep: int, batch_norm: BatchNormOrExact, proves: bool
    ) -> None:
        self.layer, self.micro_batch_size, self.keep, self.batch_norm = layer, micro_batch_size, keep, batch_norm
        self.plain: Callable[..., Any] = getattr(layer.call, "plain", layer.call)
        self._proves, self._proven = proves, set[Any]()
        self._warned = self._verifies = False
        self._named: set[str] = set()

    def install(self) -> None:
        """Make this the layer's `call`."""
        warn(self.layer, self.batch_norm, self._named, stacklevel=3)

        @functools.wraps(self.plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        call.plain, call.exact = self.plain, self.batch_norm == "exact"  # type: ignore[attr-defined]
        # Straight into __dict__: Keras would track what is set as attributes of a layer.
        vars(self.layer).update(call=call, verify=self.verify)
        for function in ("train_function", "test_function", "predict_function"):
            if hasattr(self.layer, function):
                setattr(self.layer, function, None)  # compiled without it

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if private.is_symbolic():
            return self.plain(*args, **kwargs)
        body = Body(self.layer, self.plain, self.batch_norm, args, kwargs)
        if self._verifies:
            return self._verified(body)
        warn(self.layer, self.batch_norm, self._named, stacklevel=3)
        rows = body.tensors[0].shape[0]
        if rows is not None and rows <= self.micro_batch_size:
            with during_micro_batch(body.batch_norms, "frozen" if self.batch_norm == "frozen" else "micro"):
                return self.plain(*args, **kwargs)
        outputs = self._passes(body)(body, self.micro_batch_size, self.keep)
        kind = body.training, kind_of(body.tensors)
        if self._proves and kind not in self._proven:
            self._proven.add(kind)
            self._prove(body)
        return body.outputs(outputs)

    def _passes(self, body: Body) -> Callable[[Body, int, int], list[Any]]:
        return exact_passes if self.batch_norm == "exact" and body.training and body.batch_norms else two_passes

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """Prove with these inputs that a few of their rows give the same at once and in micro-batches.

        Raises:
            NotEquivalentError: They don't; the message names the layer inside in which rows depend on each other.
            ValueError: There is but one row, or the rows can't be compared.
        """
        rows = min((leaf.shape[0] for leaf in tree.flatten((args, kwargs)) if has_rows(leaf)), default=0)
        if rows < 2:
            raise ValueError(f"verify needs at least 2 rows, to have something to compare. Received: {rows}.")
        few = min(rows, 8)
        args, kwargs = tree.map_structure(
            lambda leaf: ops.convert_to_tensor(leaf)[:few] if has_rows(leaf) else leaf, (args, kwargs)
        )
        if private.takes_training(self.layer):
            kwargs = {"training": True, **kwargs}

        self._verifies = True
        try:
            for _ in range(1 if self.layer.built else 2):  # the first call builds it
                with keras.StatelessScope(), held():
                    self.layer(*args, **kwargs)
        finally:
            self._verifies = False

    def _verified(self, body: Body) -> Any:
        """A call of `verify`."""
        outputs, few = body.run(body.tensors).outputs, body.tensors[0].shape[0]
        # What isn't exact of BatchNormalization counts.
        normalised: BatchNorm = "frozen" if body.batch_norm == "frozen" else "micro"
        if self.layer.built and (doubt := self._compare(body, few, min(3, few - 1), normalised)):
            raise ValueError(f"{body.name} can't be verified with these rows: {doubt}.")
        return body.outputs(outputs)

    # The proof: of the first call in training, and of the first outside of it. Random numbers are held, nothing is
    # moved, and BatchNormalization, which has a warning of its own, normalises by its moving statistics.

    def _prove(self, body: Body) -> None:
        if where := backends.running().unprovable():
            logger.warning(
                "It is not proven %s that %s gives the outputs and gradients of all rows at once. Call "
                "`verify(*inputs)` to prove it.",
                where,
                body.name_inside,
            )
            return
        few = max(2, min(ROWS, 2 * self.micro_batch_size))
        doubt = self._compare(body, few, (few + 1) // 2, "micro" if body.batch_norm == "exact" else "frozen")
        if doubt and not self._warned:
            self._warned = True
            warnings.warn(
                f"It could not be proven that {body.name_inside} gives the outputs and gradients of all rows at once, "
                f"because a few rows can't be evaluated ({doubt}). Call `verify(*inputs)` with inputs of yours, or "
                "leave the proof out with chunked(..., verify=False).",
                stacklevel=6,
            )

    def _compare(self, body: Body, few: int, size: int, batch_norm: BatchNorm) -> str:
        """Raises what differs. Returns why it isn't known, if it isn't."""
        doubt = ""
        known = all(None not in tuple(tensor.shape)[1:] for tensor in body.tensors)
        with backends.running().at_once(), private.outside_of_scopes():
            for unknown in UNKNOWN[:1] if known else UNKNOWN:
                try:
                    return _Trial(body, few, size, self._passes(body), batch_norm, unknown).judge()
                except (NotEquivalentError, OuterTensorError):
                    raise
                except Exception as error:  # a layer for one number of rows, or that checks what is in them
                    doubt = doubt or f"{type(error).__name__}: {error}".splitlines()[0]
        return doubt


class _Trial(StepRunner):
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
    def moved(self, seed: int, *, far: bool = False) -> Iterator[_Trial]:
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
