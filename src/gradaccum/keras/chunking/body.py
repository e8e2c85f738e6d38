"""A layer's call on a micro-batch, as a function: what it reads and assigns goes by what it is given and returns.

And its two passes over a batch: outputs without activations, then each micro-batch again for its gradients.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import Result, Scope, Spec, has_rows, is_float
from gradaccum.keras.batch_norm import BatchNormOrExact, Pool, batch_norms_of, during_micro_batch


class OuterTensorError(ValueError):
    """A layer computes with tensors that need gradients, and are neither its inputs nor its variables."""


class _Structure:
    """A structure of arguments or outputs; the leaves in it that count as tensors, and the masks of these, flat."""

    def __init__(self, structure: Any, is_one: Callable[[Any], bool]) -> None:
        self.structure, self.leaves = structure, tree.flatten(structure)
        self.places = [place for place, leaf in enumerate(self.leaves) if is_one(leaf)]
        masks = {place: private.keras_mask(self.leaves[place]) for place in self.places}
        self.masks = {place: mask for place, mask in masks.items() if mask is not None}

    def tensors(self) -> list[Any]:
        return [*(self.leaves[place] for place in self.places), *self.masks.values()]

    def filled(self, tensors: list[Any], others: Mapping[int, Any] | None = None) -> Any:
        """The structure with these tensors and masks, and other leaves by their places."""
        leaves = {**dict(enumerate(self.leaves)), **dict(zip(self.places, tensors)), **(others or {})}
        for place, mask in zip(self.masks, tensors[len(self.places) :]):
            private.set_keras_mask(leaves[place], mask)
        return tree.pack_sequence_as(self.structure, list(leaves.values()))


class Body:
    """One call of a chunked layer: `tensors` have rows, masks among them; what is `shared` may need a gradient, too.

    A first run finds out of which kinds (`specs`) a micro-batch's outputs are, the `state` that the call moves, and the
    variables that it reads and doesn't move. `beside` are tensors that `call` takes as a list behind its arguments.
    """

    specs: list[Spec]
    state: State
    read: list[Any]

    def __init__(
        self,
        layer: Any,
        call: Callable[..., Any],
        batch_norm: BatchNormOrExact,
        args: Any,
        kwargs: Any,
        beside: list[Any] | None = None,
    ) -> None:
        self.layer, self.call, self.batch_norm = layer, call, batch_norm
        self.batch_norms = batch_norms_of(layer)
        self.name_inside = f"the chunked {type(layer).__name__} {layer.name!r}"
        self.name = f"The{self.name_inside[3:]}"
        training = kwargs.get("training", private.training_of_call())
        self.training = isinstance(training, (bool, int)) and bool(training)
        self._around = private.surroundings_of_call()
        self._arguments = _Structure((args, kwargs), has_rows)
        leaves = self._arguments.leaves
        for place in self._arguments.places:
            leaves[place] = self._tensor(leaves[place])
        self._shared = [n for n, one in enumerate(leaves) if ops.is_tensor(one) and not has_rows(one) and is_float(one)]
        self._beside = beside is not None
        self.shared = [*(leaves[place] for place in self._shared), *(beside or [])]
        self.tensors = self._arguments.tensors()
        if not self.tensors or len({tensor.shape[0] for tensor in self.tensors} - {None}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors) or "no tensor with a dimension"
            raise ValueError(
                f"{self.name} is cut into micro-batches along the first dimension of its inputs, which must all have "
                f"the same number of rows. Received: {shapes}. Move what all rows share into the layer, or repeat it "
                "for each row."
            )

    def _tensor(self, leaf: Any) -> Any:
        if ops.is_tensor(leaf):
            return leaf
        if isinstance(leaf, np.ndarray):
            return ops.convert_to_tensor(leaf)
        raise TypeError(
            f"{self.name} takes tensors of Keras' {keras.backend.backend()} backend, and NumPy arrays. Received: a "
            f"{type(leaf).__module__}.{type(leaf).__qualname__} of shape {tuple(leaf.shape)}."
        )

    def again(self, tensors: list[Any], shared: list[Any], batch_norm: BatchNormOrExact) -> Body:
        """The same call with other tensors and scalars, before its first run."""
        body = copy.copy(self)
        body.tensors, body.shared, body.batch_norm = list(tensors), list(shared), batch_norm
        for name in ("specs", "state", "read"):
            vars(body).pop(name, None)
        return body

    def arguments(self, tensors: list[Any] | None = None, shared: Iterable[Any] | None = None) -> Any:
        """Positional and keyword arguments of `call`, with these in the place of `tensors` and `shared`."""
        shared = self.shared if shared is None else list(shared)
        tensors = self.tensors if tensors is None else tensors
        args, kwargs = self._arguments.filled(tensors, dict(zip(self._shared, shared)))
        return ((*args, shared[len(self._shared) :]), kwargs) if self._beside else (args, kwargs)

    def run(
        self, tensors: list[Any], values: Iterable[tuple[Any, Any]] = (), shared: Iterable[Any] | None = None
    ) -> Result:
        """Call the layer on a micro-batch, and leave no trace of it."""
        args, kwargs = self.arguments(tensors, shared)
        is_first, policy = not hasattr(self, "state"), "micro" if self.batch_norm == "warn" else self.batch_norm
        layers = self.batch_norms if is_first or policy != "pooled" else self.state.pool.layers
        with private.surroundings(self._around), Scope(values) as scope, during_micro_batch(layers, policy) as valid:
            outputs = self.call(*args, **kwargs)
        if scope.losses:
            self._refuse_losses()
        result = self.take_for_outputs(outputs) if is_first else _Structure(outputs, ops.is_tensor).tensors()
        if is_first:
            self.specs = [Spec.of(tensor) for tensor in result]
            self.check_rows(tensors[0].shape[0], [tuple(tensor.shape) for tensor in result])
            self.state = State(self, scope.assigned.values())
            self.read = [variable for key, variable in scope.read.items() if key not in scope.assigned]
        return Result(result, [scope.get_current_value(v) for v in self.state.variables], valid)

    def discover(self, batches: Any, look: Callable[[Callable[[], Any]], Any]) -> None:
        """Make the first run on shapes alone, and compare the outputs' shapes with those for another number of rows."""

        def run() -> tuple[int, list[tuple[Any, ...]]]:
            self.run(batches.at(0)[0])
            size = 1 + (batches.at(0)[1] if isinstance(batches.count, int) else 4)
            with contextlib.suppress(Exception):  # a layer that is written for one size
                other = [ops.zeros((size, *tensor.shape[1:]), tensor.dtype) for tensor in self.tensors]
                return size, [tuple(output.shape) for output in self.run(other).outputs]
            return size, []

        self.check_rows(*look(run))
        self.state.read()

    def take_for_outputs(self, outputs: Any) -> list[Any]:
        """Let outputs be of this structure. Returns the tensors in them, and their masks."""
        self._outputs = _Structure(outputs, ops.is_tensor)
        return self._outputs.tensors()

    def outputs(self, tensors: list[Any]) -> Any:
        """The outputs of the whole batch, in their structure, from their tensors."""
        return self._outputs.filled(tensors)

    def check_rows(self, rows: Any, shapes: list[tuple[Any, ...]]) -> None:
        """Compare the shapes of a micro-batch's outputs with its rows, and with the first micro-batch's."""
        wrong = [shape for shape in shapes if not shape or None is not shape[0] != rows is not None]
        if wrong:
            raise ValueError(
                f"{self.name} must return a row for each row of its inputs, in the first dimension. Received: "
                f"{', '.join(map(str, wrong))} for a micro-batch of {rows} rows. Return one row per input row, and "
                "reduce over the rows outside of the layer."
            )
        for spec, shape in zip(self.specs, shapes):
            if spec.row != tuple(shape[1:]):
                rest = ", ".join(map(str, spec.row or ()))
                raise ValueError(
                    f"{self.name} returns outputs that look across the rows: their shape is (rows, {rest}) for one "
                    f"micro-batch and {tuple(shape)} for another. Return an output for each row, and compare rows "
                    "outside the layer."
                )

    def refuse_outer(self, shapes: list[tuple[int, ...]]) -> None:
        """Refuse tensors of these shapes, if there are any."""
        if shapes:
            raise OuterTensorError(
                f"{self.name} computes with tensors that need a gradient and are neither its inputs nor its variables, "
                f"of shape {', '.join(map(str, shapes))}. The second pass can't give them one: pass them as inputs."
            )

    def _refuse_losses(self) -> None:
        layers = private.layers_in(self.layer)
        named = [repr(one.name) for one in layers if getattr(one, "activity_regularizer", None) is not None]
        who = f" (activity_regularizer of {', '.join(named)})" if named else ""
        raise ValueError(
            f"{self.name} adds losses in its forward pass{who}, and those of micro-batches are not the whole batch's. "
            "Return what they are computed from, a row for each row, and add the loss outside the layer."
        )


class State:
    """The variables that a layer's forward pass assigns, in a flat list of tensors that loops take along (`carry`).

    - First seeds, metrics, and the moving statistics that move with every micro-batch: they go from one to the next.
    - Each micro-batch finds all others (`averaged`) as they were, and they end up where it takes them on average over
      rows: exact for counters, for what depends on the weights alone, and for moving averages of means over rows.
    - Last statistics that are pooled: they move once, by mean and variance of the whole batch.
    """

    def __init__(self, body: Body, assigned: Iterable[Any]) -> None:
        variables = list(assigned)
        if trained := [variable.path for variable in variables if variable.trainable]:
            raise ValueError(
                f"{body.name} assigns trainable variables in its forward pass: {', '.join(trained)}. Micro-batches "
                "would see other weights than the whole batch. Chunk the layers around it."
            )
        ids = {id(variable) for variable in variables}
        pooled = body.batch_norms if body.batch_norm == "pooled" else []
        self.pool = Pool([layer for layer in pooled if id(layer.moving_mean) in ids])
        threaded = {id(variable) for variable in getattr(body.layer, "metrics_variables", ())}
        threaded |= {id(v) for layer in body.batch_norms for v in (layer.moving_mean, layer.moving_variance)}
        once = {id(variable) for variable in self.pool.variables}
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for variable in variables:
            if id(variable) not in once:
                kinds[id(variable) in threaded or "seed_generator_state" in (variable.path or "")].append(variable)
        self.averaged = kinds[False]
        self.variables = [*kinds[True], *self.averaged, *self.pool.variables]
        """All of them, in the order of `values`."""
        self._threaded, self._pooled = len(kinds[True]), len(kinds[True]) + len(self.averaged)
        self._before: list[Any] = []

    def read(self) -> None:
        """Note the values at the start of the call: not while it is only found out what the call moves."""
        self._before = [ops.copy(ops.convert_to_tensor(value)) for value in private.uncast_values(self.variables)]

    def start(self) -> list[Any]:
        """The carry before the first micro-batch."""
        averaged = [
            ops.zeros_like(before) if is_float(variable) else before
            for variable, before in zip(self.averaged, self._before[self._threaded :])
        ]
        return [*self._before[: self._threaded], *averaged, *self.pool.zeros()]

    def values(self, carry: list[Any]) -> list[Any]:
        """What `variables` hold for the next micro-batch."""
        return [*carry[: self._threaded], *self._before[self._threaded :]]

    def after(self, carry: list[Any], result: Result, size: Any, rows: Any) -> list[Any]:
        """The carry after a micro-batch of `size` of all rows."""
        values = result.values
        after = list(values[: self._threaded])
        for variable, total, value in zip(self.averaged, carry[self._threaded :], values[self._threaded :]):
            if is_float(variable):
                share = ops.cast(size, total.dtype) / ops.cast(rows, total.dtype)
                value = total + ops.cast(value, total.dtype) * share
            after.append(value)
        after += self.pool.add(carry[self._pooled :], values[self._pooled :], result.valid, size)
        return [ops.cast(value, before.dtype) for value, before in zip(after, carry)]

    def finish(self, carry: list[Any]) -> None:
        values = [*carry[: self._pooled], *self.pool.moved(carry[self._pooled :], self._before[self._pooled :])]
        for variable, value in zip(self.variables, values):
            variable.assign(value)


# The two passes.


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The tensors in the outputs of the whole batch, and their masks."""
    return backends.running().plainly(lambda: _Passes(body, micro_batch_size, keep).run())


class _Passes:
    def __init__(self, body: Body, micro_batch_size: int, keep: int) -> None:
        self.body, self.backend = body, backends.running()
        self.batches = self.backend.chunks(body.tensors, micro_batch_size)
        # In a graph for any number of rows, micro-batches can't be left out that aren't there: none is kept.
        self.keep = min(keep, self.batches.count) if isinstance(self.batches.count, int) else 0
        self.program = self.backend.program(body, self.batches)

    @property
    def inputs(self) -> list[Any]:
        """What needs gradients: the call's weights, and the tensors with rows."""
        return [*self.program.weights, *self.body.tensors]

    def run(self) -> list[Any]:
        """The outputs of the whole batch."""
        batches, carry, kept = self.batches, self.program.start(), []
        for index in range(self.keep):
            tensors, size = batches.at(index)
            result = self.program.evaluate(None, carry, tensors)
            carry = self._after(carry, result, size)
            kept.append([batches.part(output) for output in result.outputs])
        if not isinstance(batches.count, int) or self.keep < batches.count:
            carry = None if carry is None else [ops.stop_gradient(value) for value in carry]
            outputs, carry = self.backend.recomputed(self, carry)
            kept.append(outputs)
        self.body.state.finish([ops.stop_gradient(value) for value in carry])
        return [batches.joined(parts) for parts in zip(*kept)]

    def _after(self, carry: Any, result: Result, size: Any) -> list[Any]:
        state = self.body.state
        with self.backend.unrecorded():
            return state.after(state.start() if carry is None else list(carry), result, size, self.batches.rows)

    def first(self, inputs: Any, carry: Any) -> tuple[list[Any], list[Any]]:
        """The outputs of the micro-batches that aren't kept, and the carry behind them."""
        count = len(inputs) - len(self.body.tensors)
        weights = inputs[:count] or None

        def micro(tensors: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
            result = self.program.evaluate(weights, carry, tensors)
            return self._after(carry, result, size), result.outputs

        specs = getattr(self.body, "specs", ())
        carry, outputs = self.batches.of(list(inputs[count:])).run(micro, carry, specs, begin=self.keep)
        return outputs, carry

    def second(self, inputs: Any, start: Any, upstream: list[Any], wanted: Any = None) -> list[Any]:
        """The gradients of the inputs; of those that are `wanted`, by their numbers."""
        backend, batches, count = self.backend, self.batches, len(self.program.weights)
        weights, tensors = inputs[:count], inputs[count:]
        wanted = [n for n, one in enumerate(inputs) if is_float(one)] if wanted is None else wanted
        shared, own = [n for n in wanted if n < count], [n - count for n in wanted if n >= count]
        used = [n for n, given in enumerate(upstream) if given is not None]

        def micro(micro_batch: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
            (carry, sums), (tensors, given) = carry, micro_batch

            def outputs(inputs: list[Any]) -> Any:
                both = [*weights, *tensors]
                for n, value in zip(wanted, inputs):
                    both[n] = value
                result = self.program.evaluate(both[:count], carry, both[count:])
                return [result.outputs[n] for n in used], result

            inputs = [*(weights[n] for n in shared), *(tensors[n] for n in own)]
            found, result = backend.pullback(outputs, inputs, given, self.program)
            sums = [backend.added(*pair) for pair in zip(sums, found)]
            rows = [backend.dense(gradient, tensors[n]) for n, gradient in zip(own, found[len(shared) :])]
            return (self._after(carry, result, size), sums), rows

        whole = batches.of((list(tensors), [batches.joined([upstream[n]], self.keep) for n in used]))
        zeros = [backend.no_gradient_yet(weights[n]) for n in shared]
        specs = [Spec.of(tensors[n]) for n in own]
        (_, sums), rows = whole.run(micro, (start, zeros), specs, begin=self.keep)
        gradients: list[Any] = [None] * (count + len(tensors))
        for n, total in zip(shared, sums):
            gradients[n] = None if total is None else ops.cast(total, weights[n].dtype)
        for n, part in zip(own, rows):
            gradients[count + n] = batches.joined([part], self.keep)
        return gradients


# Exact BatchNormalization: a model is cut there, and each segment runs over all micro-batches before the next. Mean and
# variance are taken over all rows of what is normalised, by the layer itself; the next segment begins with the
# normalisation. So what stays in memory is what these layers are given, and what a shortcut carries past them.


@dataclass(frozen=True)
class _Tensor:
    """Stands for the tensor of this number in the arguments of a step."""

    number: int


@dataclass(frozen=True)
class _Step:
    """A call of a layer or an operation, and the numbers of its outputs."""

    operation: Any
    arguments: Any
    results: list[int]
    normalises: bool
    """Whether it is a BatchNormalization that goes by its batch."""
    segment: int

    def reads(self) -> list[int]:
        return [leaf.number for leaf in tree.flatten(self.arguments) if isinstance(leaf, _Tensor)]

    def filled(self, values: Mapping[int, Any]) -> Any:
        """The arguments with the values of these tensors."""
        return tree.map_structure(
            lambda leaf: values[leaf.number] if isinstance(leaf, _Tensor) else leaf, self.arguments
        )

    def run(self, values: Mapping[int, Any], statistics: list[Any]) -> list[Any]:
        """Its outputs, with these values as mean and variance where it normalises."""
        layer, (args, kwargs) = self.operation, self.filled(values)
        if isinstance(layer, keras.layers.Layer) and private.takes_training(layer):
            kwargs = {**kwargs, "training": not self.normalises}
        moving = zip((layer.moving_mean, layer.moving_variance), statistics) if self.normalises else ()
        with Scope(moving) if self.normalises else contextlib.nullcontext():
            return tree.flatten(layer(*args, **kwargs))


def exact_passes(body: Body, micro_batch_size: int, keep: int = 0) -> list[Any]:
    """The outputs of the whole batch, and their masks, of a functional or sequential model in training."""
    model, graph = body.layer, Graph(body.layer)
    args, kwargs = body.arguments()
    functional = private.functional_of(model)
    inputs = private.standardized_inputs(functional, args[0] if args else kwargs["inputs"])
    for tensor, mask in zip(inputs, tree.flatten(kwargs.get("mask"))):
        if mask is not None:
            private.set_keras_mask(tensor, mask)
    values: dict[int, Any] = dict(enumerate(inputs))
    for segment in range(graph.segments):
        values.update(_segment_passes(graph, segment, values, micro_batch_size, keep))
        values = {number: value for number, value in values.items() if graph.last_use[number] > segment}
    outputs = tree.pack_sequence_as(functional.output, [values[number] for number in graph.outputs])
    body.read = list(model.trainable_variables)
    body.state = State(body, model.non_trainable_variables)
    lone = isinstance(outputs, (list, tuple)) and len(outputs) == 1
    return body.take_for_outputs(outputs[0] if lone else outputs)


def _segment_passes(graph: Graph, segment: int, values: dict[int, Any], size: int, keep: int) -> dict[int, Any]:
    """What later segments and the outputs take of this one, by its number."""
    steps = [step for step in graph.steps if step.segment == segment]
    made = {number for step in steps for number in step.results}
    read = sorted({number for step in steps for number in step.reads()} - made)
    wanted = sorted(number for number in made if graph.last_use[number] > segment)
    # Also where nothing is wanted of it: moving statistics move.
    statistics = [s for step in steps if step.normalises for s in _statistics(step.operation, *step.filled(values))]
    if not wanted:
        return {}

    def run(tensors: list[Any], statistics: list[Any]) -> list[Any]:
        values, places = dict(zip(read, tensors)), iter(range(0, len(statistics), 2))
        for step in steps:
            place = next(places) if step.normalises else 0
            values.update(zip(step.results, step.run(values, statistics[place : place + 2])))
        return [values[number] for number in wanted]

    part = Body(graph.model, run, "micro", ([values[n] for n in read],), {}, statistics)
    return dict(zip(wanted, part.outputs(two_passes(part, size, keep))))


def _statistics(layer: Any, args: Any, kwargs: Any) -> list[Any]:
    """Mean and variance of all rows, as the layer takes them; its moving statistics make a step towards them."""
    moving = [layer.moving_mean, layer.moving_variance]
    before, momentum = private.uncast_values(moving), layer.momentum
    # Without momentum the moving statistics become the batch's.
    with private.replaced(layer, momentum=0.0), Scope() as scope:
        layer(*args, **{**kwargs, "training": True})
        found = [scope.get_current_value(variable) for variable in moving]
    for variable, old, new in zip(moving, before, found):
        variable.assign(old * momentum + ops.stop_gradient(new) * (1.0 - momentum))
    return found


class Graph:
    """The calls of a functional or sequential model, one after the other, and the segments that they run in.

    Tensors have numbers, the inputs the first ones. `last_use` is the last segment that each is needed in; behind all
    of them for an output.
    """

    def __init__(self, model: Any) -> None:
        functional = private.functional_of(model)
        if functional is None:
            raise ValueError(
                'batch_norm="exact" cuts a model at its BatchNormalization layers, so it needs a functional or '
                f"sequential model. Received: {type(model).__name__} {model.name!r}, which has a `call` of its own."
            )
        self.model, self.steps = model, list[_Step]()
        self._segment_of = [0] * len(functional.inputs)
        self.outputs = self._inline(functional, list(range(len(functional.inputs))))
        self.segments = 1 + max((step.segment for step in self.steps), default=0)
        self.last_use = dict.fromkeys(range(len(self._segment_of)), -1)
        for step in self.steps:
            for number in step.reads():
                self.last_use[number] = max(self.last_use[number], step.segment)
        self.last_use.update(dict.fromkeys(self.outputs, self.segments))

    def _inline(self, functional: Any, inputs: list[int]) -> list[int]:
        numbers = {id(tensor): number for tensor, number in zip(functional.inputs, inputs)}

        def numbered(leaf: Any) -> Any:
            return _Tensor(numbers[id(leaf)]) if isinstance(leaf, keras.KerasTensor) else leaf

        for operation, args, kwargs, outputs in private.nodes_of(functional):
            arguments = tree.map_structure(numbered, (args, kwargs))
            normalises = isinstance(operation, keras.layers.BatchNormalization) and operation.trainable
            inside = [] if normalises or not isinstance(operation, keras.layers.Layer) else batch_norms_of(operation)
            if normalises and getattr(operation, "renorm", False):
                raise ValueError(f'batch_norm="exact" does not support renorm=True. Received: {operation.name!r}.')
            if inside:
                results = self._inline_call(operation, arguments, inside[0])
            else:
                results = self._add(operation, arguments, len(outputs), normalises)
            numbers.update((id(tensor), number) for tensor, number in zip(outputs, results))
        return [numbers[id(tensor)] for tensor in functional.outputs]

    def _inline_call(self, model: Any, arguments: Any, norm: Any) -> list[int]:
        """The steps of a model inside, with this layer in it, in the place of its call."""
        (args, kwargs), within = arguments, private.functional_of(model)
        inputs = tree.flatten(args[0] if args else kwargs.get("inputs"))
        if within is None or len(inputs) != len(within.inputs):
            raise ValueError(
                f'batch_norm="exact" can\'t cut {type(model).__name__} {model.name!r} at {norm.name!r} inside of it, '
                "because it has a `call` of its own. Use a functional or sequential model there, or GroupNormalization "
                "or LayerNormalization."
            )
        numbers = [leaf.number for leaf in inputs]
        for place, mask in enumerate(tree.flatten(kwargs.get("mask"))):
            if isinstance(mask, _Tensor):
                numbers[place : place + 1] = self._add(_masked, ((_Tensor(numbers[place]), mask), {}), 1)
        return self._inline(within, numbers)

    def _add(self, operation: Any, arguments: Any, outputs: int, normalises: bool = False) -> list[int]:
        """Another step; returns the numbers of its outputs."""
        results = [len(self._segment_of) + place for place in range(outputs)]
        step = _Step(operation, arguments, results, normalises, 0)
        segment = max((self._segment_of[number] for number in step.reads()), default=0) + normalises
        self.steps.append(replace(step, segment=segment))
        self._segment_of += [segment] * outputs
        return results


def _masked(tensor: Any, mask: Any) -> Any:
    """The tensor, with the mask that a model is called with."""
    private.set_keras_mask(tensor, mask)
    return tensor
