"""A layer's call on a micro-batch, as a function: what it reads and assigns goes by what it is given and returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.keras.backends.rows import Result, Scope, Spec, has_rows
from gradaccum.keras.batch_norm import BatchNormOrExact, batch_norms_of, during_micro_batch
from gradaccum.keras.chunking.state import State
from gradaccum.keras.private import (
    keras_mask,
    layers_in,
    set_keras_mask,
    surroundings,
    surroundings_of_call,
    training_of_call,
)

__all__ = ["Body", "OuterTensorError"]


class OuterTensorError(ValueError):
    """A layer computes with tensors that need gradients, and are neither its inputs nor its variables."""


class Body:
    """One call of a chunked layer.

    Attributes:
        tensors: What has rows in the arguments: tensors, and the masks that travel with them.
        shared: Scalars in the arguments, and what is beside them: what all rows share and may need a gradient.
        specs: Of the outputs of a micro-batch, once it is `traced`.
        state: The variables that the call moves, likewise.
        read: The variables that it reads and doesn't move, likewise.
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
        self._around = surroundings_of_call()
        self._arguments = (args, kwargs)
        self._leaves = tree.flatten(self._arguments)
        self._rows = [index for index, leaf in enumerate(self._leaves) if has_rows(leaf)]
        found = [_tensor(self._leaves[index], layer) for index in self._rows]
        masks = [keras_mask(tensor) for tensor in found]
        self._masked = [index for index, mask in enumerate(masks) if mask is not None]
        self._shared = [
            index
            for index, leaf in enumerate(self._leaves)
            if ops.is_tensor(leaf)
            and not has_rows(leaf)
            and keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype))
        ]
        # `call` takes what is beside the arguments as its last one.
        self._beside = beside is not None
        self.shared = [*(self._leaves[index] for index in self._shared), *(beside or [])]
        self.tensors = [*found, *(masks[index] for index in self._masked)]
        self._check_inputs()
        self._outputs: Any = None
        self._output_leaves: list[Any] = []

    def _check_inputs(self) -> None:
        counts = {tensor.shape[0] for tensor in self.tensors} - {None}
        if len(counts) > 1 or not self.tensors:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors) or "no tensor with a dimension"
            raise ValueError(
                f"{self.name} is cut into micro-batches along the first dimension of its inputs, which must be the "
                f"same number of rows. Received: {shapes}. What all rows share belongs into the layer, or needs a row "
                "for each."
            )

    def again(self, tensors: list[Any], shared: list[Any], batch_norm: BatchNormOrExact) -> Body:
        """The same call with other tensors and scalars, not traced yet."""
        body = copy.copy(self)
        body.tensors, body.shared, body.batch_norm = list(tensors), list(shared), batch_norm
        for name in ("specs", "state", "read"):
            vars(body).pop(name, None)
        return body

    @property
    def kind(self) -> Any:
        """What calls of a kind have in common: whether they train, and the dtypes and ranks of their inputs."""
        dtypes = [(keras.backend.standardize_dtype(tensor.dtype), len(tensor.shape)) for tensor in self.tensors]
        return self.training, str(dtypes), len(self._leaves)

    @property
    def training(self) -> bool:
        """Whether it is a call in training."""
        training = self._arguments[1].get("training", training_of_call())
        return isinstance(training, (bool, int)) and bool(training)

    @property
    def name(self) -> str:
        """At the beginning of a sentence."""
        return f"The {self.name_inside[4:]}"

    @property
    def name_inside(self) -> str:
        """Inside of one."""
        return f"the chunked {type(self.layer).__name__} {self.layer.name!r}"

    def arguments(self, tensors: list[Any] | None = None, shared: list[Any] | None = None) -> Any:
        """Positional and keyword arguments of `call`, with these in the place of `tensors` and `shared`."""
        tensors, shared = self.tensors if tensors is None else tensors, self.shared if shared is None else shared
        leaves = list(self._leaves)
        for place, mask in zip(self._masked, tensors[len(self._rows) :]):
            set_keras_mask(tensors[place], mask)
        for indices, values in ((self._rows, tensors), (self._shared, shared)):
            for index, value in zip(indices, values):
                leaves[index] = value
        args, kwargs = tree.pack_sequence_as(self._arguments, leaves)
        return ((*args, shared[len(self._shared) :]), kwargs) if self._beside else (args, kwargs)

    def run(
        self, tensors: list[Any], values: Iterable[tuple[Any, Any]] = (), shared: Iterable[Any] | None = None
    ) -> Result:
        """Call the layer on a micro-batch, and leave no trace of it."""
        args, kwargs = self.arguments(tensors, self.shared if shared is None else list(shared))
        policy = "micro" if self.batch_norm == "warn" else self.batch_norm
        layers = self.state.pooled if hasattr(self, "state") and policy == "pooled" else self.batch_norms
        with surroundings(self._around), Scope(values) as scope, during_micro_batch(layers, policy) as seen:
            outputs = self.call(*args, **kwargs)
        if scope.losses:
            self._refuse_losses()
        if hasattr(self, "state"):
            result = _tensors_in(outputs)
        else:
            result = self.take_for_outputs(outputs)
            self.specs = [Spec.of(tensor) for tensor in result]
            self.check_rows(tensors[0].shape[0], [tuple(tensor.shape) for tensor in result])
            self.state = State(self, scope.assigned.values())
            self.read = [variable for key, variable in scope.read.items() if key not in scope.assigned]
        return Result(result, [scope.get_current_value(v) for v in self.state.variables], seen.valid)

    def take_for_outputs(self, outputs: Any) -> list[Any]:
        """Let outputs be of this structure. Returns the tensors in them, and their masks."""
        flat = tree.flatten(outputs)
        self._outputs, self._output_leaves = outputs, [None if ops.is_tensor(leaf) else leaf for leaf in flat]
        self._output_places = [index for index, leaf in enumerate(flat) if ops.is_tensor(leaf)]
        masks = [keras_mask(flat[index]) for index in self._output_places]
        self._output_masks = [index for index, mask in enumerate(masks) if mask is not None]
        return _tensors_in(outputs)

    def outputs(self, tensors: list[Any]) -> Any:
        """The outputs of the whole batch, in their structure, from their tensors."""
        leaves = list(self._output_leaves)
        for place, mask in zip(self._output_masks, tensors[len(self._output_places) :]):
            set_keras_mask(tensors[place], mask)
        for index, tensor in zip(self._output_places, tensors):
            leaves[index] = tensor
        return tree.pack_sequence_as(self._outputs, leaves)

    def check_rows(self, rows: Any, shapes: list[tuple[Any, ...]]) -> None:
        """Compare the shapes of a micro-batch's outputs with its rows, and with the first micro-batch's.

        Raises:
            ValueError: An output has no row for each row, or differs in more than its rows.
        """
        wrong = [shape for shape in shapes if not shape or None is not shape[0] != rows is not None]
        if wrong:
            raise ValueError(
                f"{self.name} must give a row for each row of its inputs, in the first dimension. Received: "
                f"{', '.join(map(str, wrong))} for a micro-batch of {rows} rows. Let it return what each row gives, "
                "and reduce over the rows outside of it."
            )
        for spec, shape in zip(self.specs, shapes):
            if spec.row != tuple(shape[1:]):
                raise ValueError(
                    f"{self.name} gives outputs that look across the rows: of shape (rows, "
                    f"{', '.join(map(str, spec.row or ()))}) and {tuple(shape)} for micro-batches of two sizes. Let it "
                    "return what each row gives, and compare rows outside of it."
                )

    def refuse_outer(self, shapes: list[tuple[int, ...]]) -> None:
        """Refuse tensors of these shapes, if there are any.

        Raises:
            OuterTensorError: There are some.
        """
        if shapes:
            raise OuterTensorError(
                f"{self.name} computes with tensors that need a gradient and are neither its inputs nor its variables, "
                f"of shape {', '.join(map(str, shapes))}: the second pass can't give them any. Pass them as inputs."
            )

    def _refuse_losses(self) -> None:
        named = [one for one in layers_in(self.layer) if getattr(one, "activity_regularizer", None) is not None]
        who = f" (activity_regularizer of {', '.join(repr(one.name) for one in named)})" if named else ""
        raise ValueError(
            f"{self.name} adds losses in its forward pass{who}: those of micro-batches are not the whole batch's. Let "
            "it return what they are made of, a row for each row, and add the loss outside of it."
        )


def _tensors_in(outputs: Any) -> list[Any]:
    """The tensors in outputs, and their masks."""
    found = [leaf for leaf in tree.flatten(outputs) if ops.is_tensor(leaf)]
    return [*found, *(mask for mask in map(keras_mask, found) if mask is not None)]


def _tensor(leaf: Any, layer: Any) -> Any:
    if ops.is_tensor(leaf):
        return leaf
    if isinstance(leaf, np.ndarray):
        return ops.convert_to_tensor(leaf)
    raise TypeError(
        f"The chunked {type(layer).__name__} {layer.name!r} takes tensors of Keras' {keras.backend.backend()} backend, "
        f"and NumPy arrays. Received: a {type(leaf).__module__}.{type(leaf).__qualname__} of shape {tuple(leaf.shape)}."
    )
