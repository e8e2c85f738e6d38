"""What a training step, a chunked layer and an optimizer's window ask of a backend, and what all three backends share.

Beside other versions of what is here, `on_tensorflow`, `on_jax` and `on_torch` define

- `MicroBatches`, `GradientSum`, `Training` and `Program`, see below: `cut`, `gradient_sum`, `training` and `program` of
  the backend.
- `Backend`: `take_rows(leaf, rows)`. `look(function)`: runs it for the shapes that it sees. `at_once()`: while it is
  open, operations run at once, whatever is traced, and generators beside variables stay as they are.
  `recomputed(passes, carry)`: what `passes.first(passes.inputs, carry)` returns, with the gradient of `passes.second`.
  `pullback(function, inputs, given, program)`: of `function(inputs) -> (outputs, others)` the gradients that those
  `given` of the outputs make, and the others; None: those of one output by itself. Where updates are compiled,
  `free_memory()`: bytes left on `device()`; `prepared(function, arguments, model)`: its call, compiled, and the bytes
  that it needs if known.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from gradaccum.keras import private

# Rows and tensors.

PARTS = ("x", "y", "sample_weight")
"""Of what `fit` gives a training step."""
unpack = keras.utils.unpack_x_y_sample_weight


def has_rows(leaf: Any) -> bool:
    """Scalars and None are what all rows share."""
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


def leaves_with_rows(data: Any, parts: Sequence[str] = PARTS) -> list[tuple[str, Any]]:
    """The arrays in what `fit` gives a training step, each with its path in the words of an error."""
    found = []
    for name, part in zip(PARTS, unpack(data)):
        for path, leaf in keras.tree.flatten_with_path(part) if name in parts else ():
            if has_rows(leaf):
                found.append((name + "".join(f"[{key!r}]" for key in path), leaf))
    return found


def kind_of(data: Any) -> str:
    """The dimensions and dtypes of arrays, in their structure: a key."""

    def kind(leaf: Any) -> Any:
        return hasattr(leaf, "shape") and (len(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))

    return str(keras.tree.map_structure(kind, data))


def listing(leaves: Sequence[tuple[str, Any]]) -> str:
    """These paths with their shapes, a line each, for an error."""
    return "".join(f"\n  {path}  shape {tuple(leaf.shape)}" for path, leaf in leaves)


def rows_of(data: Any) -> int | None:
    """The rows of a batch; None where the backend doesn't know them while it traces."""
    found = leaves_with_rows(data)
    rows = {leaf.shape[0] for _, leaf in found} - {None}
    if len(rows) > 1 or not found or rows == {0}:
        raise ValueError(
            "All arrays of a batch must have the same number of rows, their first dimension, and at least one. "
            f"Received:{listing(found) or ' no array that has a dimension.'}"
        )
    return rows.pop() if rows else None


def is_float(thing: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(thing.dtype))


def wide(dtype: Any) -> str:
    """The dtype to add such numbers up in: sums of many in half precision lose what they add otherwise."""
    dtype = keras.backend.standardize_dtype(dtype)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def as_dtype(share: Any, dtype: Any) -> Any:
    """A tensor in this dtype, and a number as it is: TensorFlow would cast it to float32 first."""
    return share if isinstance(share, float) else ops.cast(share, dtype)


def times(value: Any, share: Any) -> Any:
    """A tensor times a number, or times a tensor."""
    return value * as_dtype(share, value.dtype)


def quotient(weight: Any, unit: Any, dtype: Any) -> Any:
    """Of two integers, perhaps traced."""
    weight = ops.cast(weight, dtype)
    return weight if isinstance(unit, int) and unit == 1 else weight / ops.cast(unit, dtype)


@dataclass(frozen=True)
class Spec:
    """A tensor of a micro-batch: its dtype, the shape of a row (None: not known), and whether it has a mask."""

    dtype: str
    row: tuple[int | None, ...] | None
    masked: bool = False

    @classmethod
    def of(cls, tensor: Any, masks: bool = True) -> Spec:
        shape = tuple(tensor.shape)
        masked = masks and private.keras_mask(tensor) is not None
        return cls(keras.backend.standardize_dtype(tensor.dtype), shape[1:] if shape else None, masked)


class MicroBatches:
    """A batch, cut along its rows into `count` micro-batches of `size` rows, the first `larger` of them of one more.

    As `gradaccum.core.sizes.even_sizes` cuts it; but all of these may be tensors, where only the run will tell. Of a
    batch that is spread over several devices, micro-batches have `size` rows of each. Backends define:

    - `take(start, size)`: these rows.
    - `loop(first, stop, body, carry, specs)`: `body(index, carry) -> (carry, tensors to keep)` from number `first` on,
      in a `tf.while_loop`, a `lax.scan` or a loop of Python's. What was kept, of the kinds `specs`, is put together.
    """

    devices = 1
    axis = 0  # of rows, in what was kept
    take: Callable[[Any, Any], Any]
    loop: Callable[..., tuple[Any, list[Any]]]

    def __init__(self, data: Any, rows: Any, size: Callable[[Any], int], static: bool = True) -> None:
        """`size(rows)`: how many a device holds at most. `static`: a loop is over micro-batches of one size."""
        self.data, self.rows, self.static = data, rows, static
        own = rows // self.devices
        most = size(own)
        self.count = (own + most - 1) // most
        self.size, self.larger = own // self.count, own % self.count

    def bounds(self, index: Any) -> tuple[Any, Any]:
        """The first row of a micro-batch on each device, and its rows there."""
        if isinstance(index, int) and isinstance(self.larger, int):
            return index * self.size + min(index, self.larger), self.size + (index < self.larger)
        start = index * self.size + ops.minimum(index, self.larger)
        return start, self.size + ops.cast(index < self.larger, "int32")

    def at(self, index: int) -> tuple[Any, Any]:
        """A micro-batch, and its rows."""
        start, size = self.bounds(index)
        return self.take(start, size), size * self.devices

    def segments(self, begin: int) -> Iterator[tuple[Any, Any, Callable[[Any], tuple[Any, Any]]]]:
        """Loops over the micro-batches: `(first, behind the last, index -> (its first row, its size))`."""
        size, larger = self.size, self.larger
        segments: list[tuple[Any, Any, Any]] = [(0, self.count, self.bounds)]
        if isinstance(larger, int) and larger == 0:
            segments = [(0, self.count, lambda index: (index * size, size))]
        elif self.static:
            # XLA compiles the first loop even where no micro-batch is longer: its slices must exist.
            longest = size + 1 if isinstance(larger, int) else ops.minimum(size + 1, self.rows)
            segments = [(0, larger, lambda index: (index * (size + 1), longest))]
            segments.append((larger, self.count, lambda index: (index * size + larger, size)))
        for first, stop, bounds in segments:
            first = max(first, begin) if begin else first  # some are kept only where all numbers are known
            if not isinstance(stop, int) or first < stop:
                yield first, stop, bounds

    def run(self, micro: Any, carry: Any, specs: Any = (), threads: Any = (), begin: int = 0) -> tuple[Any, list[Any]]:
        """`micro(micro-batch, its rows, carry) -> (carry, tensors to keep)` on each from number `begin` on.

        `specs` are the kinds of what is kept. `threads` are variables that move: where a scope keeps what is assigned,
        loops take their values along.
        """
        threads = threads if private.in_stateless_scope() else ()
        state, pieces = (values_of(threads), carry), []
        for first, stop, bounds in self.segments(begin):

            def body(index: Any, state: Any, bounds: Any = bounds) -> tuple[Any, list[Any]]:
                start, size = bounds(index)
                with Scope(zip(threads, state[0])) if threads else contextlib.nullcontext():
                    carry, kept = micro(self.take(start, size), size * self.devices, state[1])
                    return (values_of(threads), carry), kept

            state, kept = self.loop(first, stop, body, state, specs)
            pieces.append(kept)
        assign(threads, state[0])
        return state[1], [self._concatenated(parts) for parts in zip(*pieces)]

    def of(self, data: Any) -> Any:
        """The same cut of other tensors with as many rows."""
        other = copy.copy(self)
        other.data = data
        return other

    def part(self, output: Any) -> Any:
        """An output for one micro-batch, as what was kept."""
        return output

    def joined(self, parts: Sequence[Any], begin: int = 0) -> Any:
        """What was kept of consecutive micro-batches, in the order of the batch; zeros for those before `begin`."""
        if begin:
            shape = list(ops.shape(parts[0]))
            shape[self.axis] = self.bounds(begin)[0]
            parts = [ops.zeros(shape, parts[0].dtype), *parts]
        return self._concatenated(parts)

    def _concatenated(self, parts: Sequence[Any]) -> Any:
        return ops.concatenate(list(parts), self.axis) if len(parts) > 1 else parts[0]


def joined(total: Any, gradient: Any, overwritten: bool = False) -> Any:
    """A sum and a gradient, if there is one; of what is overwritten with its gradient, the larger one."""
    if gradient is None:
        return total
    gradient = ops.cast(gradient, total.dtype)
    return ops.maximum(total, gradient) if overwritten else total + gradient


class GradientSum:
    """Gradients of a model's trainable weights, added up in at least 32 bits.

    Of those whose gradient is their next value (`overwriting`, by index), the largest. Backends define
    `gradients(forward)`, of `forward() -> (loss, others)`: a gradient or None for each weight, the others, and rows to
    keep for `finish`, of the kinds `specs`.
    """

    specs: tuple[Spec, ...] = ()
    gradients: Callable[[Callable[[], Any]], tuple[list[Any], Any, list[Any]]]

    def __init__(self, model: Any) -> None:
        self.model, self.weights = model, model.trainable_weights
        self.overwriting = frozenset(i for i, one in enumerate(self.weights) if private.is_overwritten(one))

    def zeros(self) -> Any:
        """What sums begin with."""
        return [ops.zeros(weight.shape, wide(weight.dtype)) for weight in self.weights]

    def add(self, sums: Any, forward: Callable[[], Any], share: Any) -> tuple[Any, Any, list[Any]]:
        """The sums with `share` of the loss's gradient; the others; and rows to keep."""

        def shared() -> Any:
            loss, others = forward()
            return times(loss, share), others

        gradients, others, kept = self.gradients(shared)
        after = [joined(*pair, index in self.overwriting) for index, pair in enumerate(zip(sums, gradients))]
        return after, others, kept

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        """The gradients, times `scale` if any."""
        return sums


# Variables.


class Scope(keras.StatelessScope):
    """Keeps what is assigned to itself; what it doesn't hold is read from the scope around it."""

    def __init__(self, values: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping = {id(variable): value for variable, value in values}
        self.read: dict[int, Any] = {}
        self.assigned: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        self.read[id(variable)] = variable
        return None if self.original_scope is None else self.original_scope.get_current_value(variable)

    def add_update(self, update: Any) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def discarded(model: Any) -> Scope:
    """A scope in which a model moves nothing but what the scope forgets."""
    return Scope(zip(model.trainable_variables, values_of(model.trainable_variables)))


def values_of(variables: Iterable[Any]) -> list[Any]:
    """The values of variables, as a scope or they themselves have them."""
    return [variable.value for variable in variables]


def copies_of(variables: Iterable[Any]) -> list[Any]:
    """The same, whatever becomes of the variables."""
    return [ops.copy(value) for value in values_of(variables)]


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class Result(NamedTuple):
    """What a chunked layer's call on a micro-batch gives: tensors and masks, moved variables, values let through."""

    outputs: list[Any]
    values: list[Any]
    valid: dict[int, Any]


class Program:
    """A chunked layer's call on a micro-batch, as a function of its `weights`, which may need gradients."""

    def __init__(self, body: Any, batches: Any) -> None:
        self.body, self.weights = body, list[Any]()
        self.variables: list[Any] = []
        self.raw: list[Any] = []  # weights that nothing can stand in for
        self.frozen: list[tuple[Any, Any]] = []  # variables that it reads, with their values

    def settle(self, parameters: Iterable[Any] = ()) -> None:
        """Its first run has told what it reads; it may compute with these parameters, too."""
        self.variables = [variable for variable in self.body.read if variable.trainable and is_float(variable)]
        values = private.uncast_values(self.variables)
        known = {id(value) for value in values}
        self.raw = [parameter for parameter in parameters if id(parameter) not in known]
        self.weights = [*values, *self.raw, *self.body.shared]

    def start(self) -> Any:
        """The carry before the first micro-batch."""
        return self.body.state.start()

    def evaluate(self, weights: Any, carry: Any, tensors: list[Any]) -> Result:
        """The call with these weights; None: its own."""
        state, weights = self.body.state, self.weights if weights is None else weights
        moving = zip(state.variables, state.values(list(carry)))
        values = [*zip(self.variables, weights), *self.frozen, *moving]
        return self.body.run(tensors, values, weights[len(self.variables) + len(self.raw) :])


def loss_and_outputs(model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
    """A forward pass in training, as `fit` makes it."""
    y_pred = model(x, training=True) if private.takes_training(model) else model(x)
    return private.compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True), y_pred


class RestartWindow(Exception):  # no error: the window runs again
    """The window has to begin again, in the micro-batches in which it ran: something shows only while it runs."""


class Training:
    """What a training step does in another way on one backend or the other."""

    drew = False  # whether the batch that was evaluated last drew random numbers that nobody holds
    _evaluated: Callable[..., Any] | None = None

    def __init__(self, step: Any) -> None:
        self.step = step

    def call(self, *args: Any) -> Any:
        """Keras' signature of a training step."""
        return self.step.update(*args)

    def attempt(self, data: Any, rows: Any, size: Callable[[Any], int], run: Callable[[Any, Any], Any]) -> Any:
        """`run(micro-batches, gradient sum)`, and once more where it must start over."""
        model, backend = self.step.model, self.step.backend
        batches, sums = backend.cut(data, rows, size, model.jit_compile), backend.gradient_sum(model)
        while True:
            with contextlib.suppress(RestartWindow):
                return run(batches, sums)

    def build(self, data: Any) -> None:
        """Build the model, its losses, metrics and optimizer, where that is still to do."""
        private.build_symbolically(self.step.model, data)

    def forget(self) -> None:
        """The model has been built, or compiled anew."""

    def counted(self, batches: Any, run: Callable[[Any], Any]) -> Any:
        """What `run(micro-batches)` returns, whose forward passes move nothing."""
        with discarded(self.step.model):
            return run(batches)

    def look(self, function: Callable[[Any], Any], batches: Any) -> Any:
        """What `function(micro-batch)` returns for shapes, or a few rows, without side effects."""
        return self.step.backend.look(lambda: function(batches.at(0)[0]))

    def compute(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Loss times the optimizer's scale, loss and outputs of a micro-batch, as `fit` computes them."""
        model = self.step.model
        loss, y_pred = loss_and_outputs(model, x, y, sample_weight)
        return loss if model.optimizer is None else model.optimizer.scale_loss(loss), loss, y_pred

    def evaluate(self, data: Any, state: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """Loss, gradients, and the non-trainable variables before and after, from a state or as it is. Moves none."""
        step = self.step
        state = step.state() if state is None else state
        if self._evaluated is None:

            def evaluated(state: Any, data: Any) -> tuple[Any, list[Any], list[Any]]:
                with self.in_scope(state):
                    return (*self.sums(data), step.state()[1])

            eager = step.model.run_eagerly or not step.model.jit_compile
            self._evaluated = evaluated if eager else step.backend.compiled(evaluated)
        loss, gradients, after = self._evaluated(state, data)
        return loss, gradients, state[1], after

    def in_scope(self, state: Any) -> Scope:
        """A scope in which the step's variables have these values."""
        parts = self.step.variables()
        return Scope((v, value) for variables, values in zip(parts, state) for v, value in zip(variables, values))

    def sums(self, data: Any) -> tuple[Any, list[Any]]:
        """A batch's loss and gradients, as tensors."""
        window = self.step.window(data)
        return ops.sum(window.loss), [None if one is None else ops.convert_to_tensor(one) for one in window.gradients]

    # Keras' training function: a state, on JAX, and an iterator over batches.

    def make_train_function(self, make: Callable[[], None]) -> None:
        """Keras' own; where an update is to be proved, behind a look at its batches, which are drawn here for that."""
        make()
        model, proof = self.step.model, self.step.proof
        function: Callable[..., Any] = model.train_function

        def guarded(*args: Any) -> Any:
            *state, iterator = args
            try:
                if proof is None or not proof.due.includes(model.steps_per_execution):
                    return function(*args)
                drawn = iter(iterator)
                batches = [next(drawn), *itertools.islice(drawn, model.steps_per_execution - 1)]
                for data in map(self.all_rows, batches):
                    rows_of(data)
                    self.build(data)
                    proof.run(data, *state)
                result = function(*state, self.again(batches, iterator))
                proof.warn()
                return result
            except Exception:
                self.recover(*state)
                raise

        model.train_function = guarded

    def all_rows(self, batch: Any) -> Any:
        """A batch; of one that is spread over replicas, all rows."""
        return batch

    def again(self, batches: list[Any], iterator: Any) -> Any:
        """An iterator over these batches of an iterator."""
        return iter(batches)

    def recover(self, state: Any = None) -> None:
        """Put things right after a training function has raised."""


class Backend:
    """What is asked of a backend; where it says nothing else, this."""

    keeps_masks = True  # masks come with outputs
    # Whether what a loss divides by may be found while gradients are summed. Else a first pass counts it, of which
    # compilers drop all that the counts don't depend on.
    lazy_divisors = False
    cut: Any
    gradient_sum: Any
    training: Any = Training
    program: Any = Program
    unrecorded: Any = contextlib.nullcontext  # while it is open, nothing is recorded for gradients
    pullback: Callable[..., tuple[list[Any], Any]]

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        optimizer.apply(gradients, variables)

    def value_and_gradients(self, function: Callable[[list[Any]], Any], values: list[Any]) -> tuple[Any, list[Any]]:
        """What a function returns, a scalar and others, and the scalar's gradients."""

        def scalar(values: list[Any]) -> tuple[list[Any], Any]:
            found = function(values)
            return [found[0]], found

        with self.unrecorded():
            gradients, found = self.pullback(scalar, values)
        return found, [None if gradient is None else ops.convert_to_tensor(gradient) for gradient in gradients]

    def known(self, tensors: list[Any]) -> bool:
        """Whether these hold numbers: not while a function is traced."""
        return True

    def when(
        self, condition: Any, then: Callable[[], None], otherwise: Callable[[], None], variables: list[Any]
    ) -> None:
        """One of these functions, which assign to these variables."""
        (then if condition else otherwise)()

    # A chunked layer.

    def chunks(self, tensors: list[Any], micro_batch_size: int) -> Any:
        """Its inputs in micro-batches: in loops over those of one size, as XLA may compile them."""
        return self.cut(tensors, tensors[0].shape[0], lambda rows: micro_batch_size)

    def no_gradient_yet(self, weight: Any) -> Any:
        """What gradients are added to."""
        return ops.zeros_like(weight, wide(weight.dtype))  # TensorFlow may not know its rows

    def added(self, total: Any, gradient: Any) -> Any:
        return joined(total, gradient)

    def dense(self, gradient: Any, tensor: Any) -> Any:
        return ops.zeros_like(tensor) if gradient is None else ops.convert_to_tensor(gradient)

    def plainly(self, run: Callable[[], Any]) -> Any:
        """`run()`, not as part of a graph that can't hold it."""
        return run()

    def unprovable(self) -> str:
        """Where nothing can be evaluated beside what is running; empty where it can."""
        return ""

    def outer_tensors(self, outputs: list[Any], values: list[Any], layer: Any) -> list[tuple[int, ...]]:
        """Shapes of what `outputs` pass gradients to beside `values` and a module's own parameters."""
        return []

    def compiled(self, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`function(values)`, compiled as quickly as possible where running it at once would compile each operation."""
        return function

    # An optimizer's window, and on several devices its replicas.

    def merged(self, function: Callable[..., None], gradients: list[Any], rows: Any) -> None:
        """`function(gradients, rows)`, once for all replicas."""
        function(gradients, rows)

    def in_replicas(self, function: Callable[[], None]) -> None:
        function()

    def close(self, window: Any) -> None:
        """Close a window with what it holds, outside of a compiled function."""
        window.update(window.read_traced(), [])

    def host(self) -> Any:
        """Where the counts are kept: reading them must not wait for an accelerator."""
        return contextlib.nullcontext()

    def rows_of_all(self, rows: Any) -> Any:
        """The rows of all replicas."""
        return rows

    def checked_rows(self, leaves: list[tuple[str, Any]], least: int | None = None) -> Any:
        """The rows of these arrays, by path, which only the run will tell; an error if they differ."""

    def integers(self, value: Any) -> list[Any]:
        """The entries of a vector, as this backend computes with them in a step."""
        return list(ops.unstack(value))

    def vector(self, numbers: list[Any], dtype: str) -> Any:
        """Integers, of which some may be traced."""
        if any(map(ops.is_tensor, numbers)):
            return ops.stack([ops.cast(number, dtype) for number in numbers])
        return ops.convert_to_tensor(np.asarray(numbers), dtype)

    def add_up(self, window: Any, gradients: list[Any], rows: Any, weight: Any, unit: Any) -> None:
        """Add a micro-batch's gradients `weight / unit` times to the sums."""
        for total, gradient, variable in zip(window.sums, gradients, window.variables):
            overwritten = private.is_overwritten(variable)
            if gradient is not None and not overwritten:
                gradient = ops.cast(gradient, total.dtype) * quotient(weight, unit, total.dtype)
            total.assign(joined(total.value, gradient, overwritten))

    def divided(self, window: Any, weight: Any, unit: Any) -> list[Any]:
        """The sums divided by `weight / unit`, which they weigh. They are emptied next."""
        total, pairs = functools.cache(lambda dtype: quotient(weight, unit, dtype)), zip(window.sums, window.variables)
        return [s.value if private.is_overwritten(v) else s.value / total(s.dtype) for s, v in pairs]

    def separate(self, variables: Sequence[Any], others: Sequence[Any]) -> None:
        """Let variables hold tensors of their own, where assigning one to another makes both hold the same."""

    def empty(self, variables: list[Any]) -> None:
        for variable in variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    def replica(self) -> Any:
        """Which replica's training step this is."""
        return 0

    def place_of(self, optimizer: Any) -> Any:
        """Where an optimizer's variables live, if the backend has to be told."""

    def beside(self, place: Any, variable: Any) -> Any:
        """Where the variables that go with this one are made."""
        return contextlib.nullcontext()

    def total(self, variable: Any) -> Any:
        """A sum over all replicas."""
        return variable.value

    def put(self, variable: Any, value: Any) -> None:
        """Let the replicas' sums add up to this."""
        variable.assign(value)
