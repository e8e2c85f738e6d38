"""Exact BatchNormalization: a model is cut there, and each segment runs over all micro-batches before the next.

A layer's mean and variance are taken over all rows of what it normalises, by the layer itself; the next segment begins
with the normalisation. So what stays in memory is what these layers are given, and what a shortcut carries past them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from gradaccum.keras import private
from gradaccum.keras.backends.base import Scope
from gradaccum.keras.batch_norm import batch_norms_of
from gradaccum.keras.chunking.body import Body, State, two_passes

__all__ = ["Program", "exact_passes"]


@dataclass(frozen=True)
class _Tensor:
    """The tensor of this number, among the arguments of a step."""

    number: int


@dataclass(frozen=True)
class _Step:
    """A call of a layer or an operation, whose arguments have a `_Tensor` in the place of each tensor."""

    operation: Any
    arguments: Any
    results: list[int]
    """The numbers of its outputs."""
    normalises: bool
    """Whether it is a BatchNormalization that goes by its batch."""
    segment: int
    """In which it runs."""

    def filled(self, values: Mapping[int, Any]) -> Any:
        """The arguments with the values of these tensors."""
        return tree.map_structure(
            lambda leaf: values[leaf.number] if isinstance(leaf, _Tensor) else leaf, self.arguments
        )


def _reads(arguments: Any) -> list[int]:
    """The numbers of the tensors in these."""
    return [leaf.number for leaf in tree.flatten(arguments) if isinstance(leaf, _Tensor)]


def exact_passes(body: Body, micro_batch_size: int, keep: int = 0) -> list[Any]:
    """The outputs of the whole batch, and their masks, of a functional or sequential model in training."""
    model, program = body.layer, Program(body.layer)
    args, kwargs = body.arguments()
    inputs = private.standardized_inputs(private.functional_of(model), args[0] if args else kwargs["inputs"])
    for tensor, mask in zip(inputs, tree.flatten(kwargs.get("mask"))):
        if mask is not None:
            private.set_keras_mask(tensor, mask)
    values: dict[int, Any] = dict(enumerate(inputs))
    for segment in range(program.segments):
        values.update(_segment_passes(program, segment, values, micro_batch_size, keep))
        values = {number: value for number, value in values.items() if program.last_use[number] > segment}
    flat = [values[number] for number in program.outputs]
    outputs = tree.pack_sequence_as(private.functional_of(model).output, flat)
    body.read = list(model.trainable_variables)
    body.state = State(body, model.non_trainable_variables)
    lone = isinstance(outputs, (list, tuple)) and len(outputs) == 1
    return body.take_for_outputs(outputs[0] if lone else outputs)


def _segment_passes(program: Program, segment: int, values: dict[int, Any], size: int, keep: int) -> dict[int, Any]:
    """What later segments and the outputs take of this one, by its number."""
    steps = [step for step in program.steps if step.segment == segment]
    beside = [s for step in steps if step.normalises for s in _statistics(step.operation, *step.filled(values))]
    made = {number for step in steps for number in step.results}
    read = sorted({number for step in steps for number in _reads(step.arguments)} - made)
    wanted = sorted(number for number in made if program.last_use[number] > segment)
    if not wanted:
        return {}

    def run(tensors: list[Any], beside: list[Any]) -> list[Any]:
        values, statistics = dict(zip(read, tensors)), iter(beside)
        for step in steps:
            layer = step.operation
            args, kwargs = step.filled(values)
            moving = []
            if step.normalises:
                moving = [(layer.moving_mean, next(statistics)), (layer.moving_variance, next(statistics))]
            if isinstance(layer, keras.layers.Layer) and private.takes_training(layer):
                kwargs = {**kwargs, "training": not step.normalises}
            with Scope(moving) if moving else contextlib.nullcontext():
                values.update(zip(step.results, tree.flatten(layer(*args, **kwargs))))
        return [values[number] for number in wanted]

    part = Body(program.model, run, "micro", ([values[n] for n in read],), {}, beside)
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


class Program:
    """The calls of a functional or sequential model, one after the other, and the segments that they run in.

    Attributes:
        steps: The calls.
        outputs: The numbers of the model's outputs; its inputs come first.
        segments: How many there are.
        last_use: The last segment that each tensor is needed in; behind all of them, for an output.
    """

    def __init__(self, model: Any) -> None:
        functional = private.functional_of(model)
        if functional is None:
            raise ValueError(
                'batch_norm="exact" cuts a model at its BatchNormalization layers, and needs a functional or '
                f"sequential model to see where. Received: {type(model).__name__} {model.name!r}, whose `call` is its "
                "own."
            )
        self.model, self.steps = model, list[_Step]()
        self._segment_of = [0] * len(functional.inputs)
        self.outputs = self._inline(functional, list(range(len(functional.inputs))))
        self.segments = 1 + max((step.segment for step in self.steps), default=0)
        self.last_use = {number: -1 for number in range(len(self._segment_of))}
        for step in self.steps:
            for number in _reads(step.arguments):
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
            if inside:
                results = self._inline_call(operation, arguments, inside[0])
            else:
                if normalises and getattr(operation, "renorm", False):
                    raise ValueError(f'batch_norm="exact" does not know renorm=True. Received: {operation.name!r}.')
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
                "as its `call` is its own. Use a functional or sequential model there, or GroupNormalization or "
                "LayerNormalization."
            )
        numbers = [leaf.number for leaf in inputs]
        for place, mask in enumerate(tree.flatten(kwargs.get("mask"))):
            if isinstance(mask, _Tensor):
                numbers[place : place + 1] = self._add(_masked, ((_Tensor(numbers[place]), mask), {}), 1)
        return self._inline(within, numbers)

    def _add(self, operation: Any, arguments: Any, outputs: int, normalises: bool = False) -> list[int]:
        """Another step; returns the numbers of its outputs."""
        results = [len(self._segment_of) + place for place in range(outputs)]
        segment = max((self._segment_of[number] for number in _reads(arguments)), default=0) + normalises
        self.steps.append(_Step(operation, arguments, results, normalises, segment))
        self._segment_of += [segment] * outputs
        return results


def _masked(tensor: Any, mask: Any) -> Any:
    """The tensor, with the mask that a model is called with."""
    private.set_keras_mask(tensor, mask)
    return tensor
