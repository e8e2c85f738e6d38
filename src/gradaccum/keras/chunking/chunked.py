"""`chunked(encoder, 16)`: the outputs of all rows, in the memory of 16, for any loss.

```python
images, texts = gradaccum.keras.chunked(image_encoder, 16), gradaccum.keras.chunked(text_encoder, 16)
model = keras.Model([x, t], contrastive_loss(images(x), texts(t)))
model.fit([x, t], batch_size=1024)       # every row against 1023 others
```
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from gradaccum.errors import NotEquivalentError
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import has_rows, kind_of
from gradaccum.keras.batch_norm import BatchNorm, BatchNormOrExact, checked_batch_norm, during_micro_batch, warn
from gradaccum.keras.chunking.body import Body, Graph, OuterTensorError, exact_passes, two_passes
from gradaccum.keras.chunking.proof import ChunkTrial
from gradaccum.keras.proof import held
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
                    return ChunkTrial(body, few, size, self._passes(body), batch_norm, unknown).judge()
                except (NotEquivalentError, OuterTensorError):
                    raise
                except Exception as error:  # a layer for one number of rows, or that checks what is in them
                    doubt = doubt or f"{type(error).__name__}: {error}".splitlines()[0]
        return doubt
