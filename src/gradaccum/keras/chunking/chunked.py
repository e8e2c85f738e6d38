"""`chunked(encoder, 16)`: the outputs of all rows, in the memory of 16, for any loss.

```python
images, texts = gradaccum.keras.chunked(image_encoder, 16), gradaccum.keras.chunked(text_encoder, 16)
model = keras.Model([x, t], contrastive_loss(images(x), texts(t)))
model.fit([x, t], batch_size=1024)       # every row against 1023 others
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import keras
from keras import ops, tree

from gradaccum.keras import private
from gradaccum.keras.backends.base import has_rows
from gradaccum.keras.batch_norm import BatchNormOrExact, during_micro_batch, warn
from gradaccum.keras.chunking.body import Body, two_passes
from gradaccum.keras.chunking.exact_batch_norm import Program, exact_passes
from gradaccum.keras.chunking.proof import Proof
from gradaccum.keras.equivalence import held
from gradaccum.schedule import checked_count

__all__ = ["chunked"]


def chunked(
    layer_or_model: Any,
    micro_batch_size: int,
    *,
    keep: int = 0,
    batch_norm: BatchNormOrExact = "warn",
    verify: bool = True,
) -> Any:
    """Let a layer or model run each batch in micro-batches: the whole batch's outputs and gradients, for any loss.

    The first pass runs it over micro-batches and keeps nothing but the outputs; the loss sees all of them; backward
    runs each micro-batch again and adds up

        dL/dp = sum_i (dL/d out_i) (d out_i/dp)        over micro-batches i, with dL/d out of the whole batch's loss

    so losses that compare rows (contrastive, triplet, Dice, balance losses) have the large batch's gradient in the
    memory of a few rows, at the cost of one more forward pass.

    Args:
        layer_or_model: A `keras.layers.Layer` or `keras.Model` whose outputs for a row depend on that row alone. It is
            changed in place, and nothing of that is saved: weights, names and `get_config()` stay its own. Its inputs
            and outputs are tensors with rows in their first dimension, in any structure.
        micro_batch_size: Rows that one forward and backward pass holds at most, on each device where the batch is
            spread over several.
        keep: Micro-batches whose activations are kept, and which are not run again: time for memory.
        batch_norm: What `BatchNormalization` inside does, in the words of `micro_batched`: `"warn"` (as `"micro"`, and
            says so), `"micro"`, `"pooled"` or `"frozen"`; or `"exact"`: mean and variance of all rows, as without
            chunks, in a functional or sequential model, which is cut at these layers. What they are given stays in
            memory.
        verify: Prove the first call in training, and the first outside of it: the outputs and gradients of a few rows,
            at once and in micro-batches, by the same code. While TensorFlow or JAX trace a function, there are no rows
            to look at, and random numbers stand for them. What can't be compared is said in a warning.

    Returns:
        `layer_or_model`, with a method `verify(*inputs)` that proves the same at any time, on rows of yours.

    Raises:
        TypeError: `layer_or_model` is no layer of Keras', a number is no int, or an input is no tensor of the backend.
        ValueError: A number is too small, `batch_norm` is none of these, the layer is a BatchNormalization by itself,
            or can't be cut for `"exact"`.
            When it is called: inputs of different numbers
            of rows, outputs without a row for each row, losses that are added in the forward pass, trainable variables
            that are assigned there.
        NotEquivalentError: From its first call, and from `verify`: a row's outputs depend on other rows; the message
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
            f"{type(layer_or_model).__module__}.{type(layer_or_model).__qualname__}. Modules of PyTorch are "
            "gradaccum.torch.chunked's, functions on JAX gradaccum.jax.chunked's."
        )
    if isinstance(layer_or_model, keras.layers.BatchNormalization):
        raise ValueError(
            f"A BatchNormalization by itself looks across the rows of its batch, and nothing else. Received: "
            f"{layer_or_model.name!r}. Chunk the layers around it, or the model that it is in."
        )
    checked_count(micro_batch_size, "micro_batch_size")
    checked_count(keep, "keep", least=0)
    if batch_norm not in get_args(BatchNormOrExact):
        raise ValueError(
            f"`batch_norm` must be one of {get_args(BatchNormOrExact)}. Received: batch_norm={batch_norm!r}."
        )
    if batch_norm == "exact":
        if keep:
            raise ValueError(f'batch_norm="exact" runs every segment of a model again. Received: keep={keep}.')
        if layer_or_model.built or not isinstance(layer_or_model, keras.Sequential):
            Program(layer_or_model)  # refused here, if at all
    _Chunking(layer_or_model, micro_batch_size, keep, batch_norm, verify).install()
    return layer_or_model


class _Chunking:
    """Stands in for a layer's `call`."""

    def __init__(
        self, layer: Any, micro_batch_size: int, keep: int, batch_norm: BatchNormOrExact, proves: bool
    ) -> None:
        self.layer, self.micro_batch_size, self.keep, self.batch_norm = layer, micro_batch_size, keep, batch_norm
        self.plain: Callable[..., Any] = getattr(layer.call, "plain", layer.call)
        self._proof, self._proves = Proof(), proves
        self._named: set[str] = set()

    def install(self) -> None:
        """Make this the layer's `call`."""
        self._warn(stacklevel=4)

        @functools.wraps(self.plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        call.plain, call.exact = self.plain, self.batch_norm == "exact"  # type: ignore[attr-defined]
        # Straight into __dict__: Keras would track what is set as attributes of a layer.
        vars(self.layer).update(call=call, verify=self.verify)
        for function in ("train_function", "test_function", "predict_function"):
            if hasattr(self.layer, function):
                setattr(self.layer, function, None)  # compiled without it

    def _warn(self, stacklevel: int) -> None:
        if self.batch_norm == "warn":
            warn(self.layer, self._named, stacklevel)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if private.is_symbolic():
            return self.plain(*args, **kwargs)
        self._warn(stacklevel=4)
        body = Body(self.layer, self.plain, self.batch_norm, args, kwargs)
        rows = body.tensors[0].shape[0]
        if rows is not None and rows <= self.micro_batch_size:
            with during_micro_batch(body.batch_norms, "frozen" if self.batch_norm == "frozen" else "micro"):
                return self.plain(*args, **kwargs)
        passes = self._passes(body)
        outputs = passes(body, self.micro_batch_size, self.keep)
        if self._proves:
            self._proof.first(body, self.micro_batch_size, passes)
        return body.outputs(outputs)

    def _passes(self, body: Body) -> Callable[[Body, int, int], list[Any]]:
        cut = self.batch_norm == "exact" and body.training and body.batch_norms
        return exact_passes if cut else two_passes

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """Prove with these inputs that a few of their rows give the same at once and in micro-batches.

        Raises:
            NotEquivalentError: They don't; the message names the layer inside in which rows depend on each other.
            ValueError: There is but one row.
        """
        leaves = tree.flatten((args, kwargs))
        rows = min((leaf.shape[0] for leaf in leaves if has_rows(leaf)), default=0)
        if rows < 2:
            raise ValueError(f"verify needs at least 2 rows, to have something to compare. Received: {rows}.")
        few = min(rows, 8)

        def taken(leaf: Any) -> Any:
            return ops.convert_to_tensor(leaf)[:few] if has_rows(leaf) else leaf

        args, kwargs = tree.map_structure(taken, (args, kwargs))
        if private.takes_training(self.layer):
            kwargs = {"training": True, **kwargs}

        def call(*args: Any, **kwargs: Any) -> Any:
            body = Body(self.layer, self.plain, self.batch_norm, args, kwargs)
            outputs = body.run(body.tensors).outputs
            if self.layer.built:
                self._proof.demanded(body, few, min(3, few - 1), self._passes(body))
            return body.outputs(outputs)

        own, vars(self.layer)["call"] = vars(self.layer)["call"], call
        try:
            for _ in range(1 if self.layer.built else 2):  # the first call builds it
                with keras.StatelessScope(), held():
                    self.layer(*args, **kwargs)
        finally:
            vars(self.layer)["call"] = own
