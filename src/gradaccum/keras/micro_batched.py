"""`micro_batched(model, 16)`: `fit` at the large batch, in the memory of the small one.

```python
model = gradaccum.keras.micro_batched(model, 16)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=256)          # each update: 16 micro-batches of 16 rows
```
"""

from __future__ import annotations

from typing import Literal, TypeVar

import keras

from gradaccum.keras.batch_norm import BatchNormOrExact, checked_batch_norm
from gradaccum.keras.chunking import chunked
from gradaccum.keras.train_step import MicroBatchedStep, remove_step
from gradaccum.schedule import checked_count

Model = TypeVar("Model", bound=keras.Model)
"""The type of the user's model, which `micro_batched` returns as it is."""


def micro_batched(
    model: Model, micro_batch_size: int | Literal["auto"], *, batch_norm: BatchNormOrExact = "warn", verify: bool = True
) -> Model:
    """Let `fit` and `train_on_batch` run each batch in micro-batches, with the update of the whole batch.

    The update after micro-batches i of `rows_i` rows is the one plain `fit` makes from the whole batch:

        gradient of  sum_j N_j / D_j,     N_j = sum_i N_ij,   D_j = sum_i D_ij

    where `N_ij` is what loss j sums over micro-batch i, and `D_ij` what it divides by: rows, the sum of sample weights,
    or what a mask lets through.

    Args:
        model: Any `keras.Model` that doesn't override `train_step`: functional, sequential or subclassed, built or not,
            compiled or not. Its training step is replaced, which its file doesn't record.
        micro_batch_size: Rows that one forward and backward pass holds at most, on each device where the batch is
            spread over several; or `"auto"`, the fastest that fits, found during the first updates on PyTorch, and
            measured before the first one where the update is compiled.
        batch_norm: What `BatchNormalization` does. `"warn"`: as `"micro"`, with a warning. `"micro"`: each micro-batch
            is normalized by itself, and the moving statistics move with every one. `"pooled"`: the moving statistics
            move once per update, by mean and variance of the whole batch. `"frozen"`: normalizes by the moving
            statistics, which stay as they are. `"exact"`: by mean and variance of the whole batch, as in plain `fit`; a
            functional or sequential model is cut at these layers, and each segment runs over all micro-batches before
            the next. Inputs of these layers, and the model's outputs, stay in memory.
        verify: Compare at most 16 rows at once with the same rows in micro-batches, by the code that then trains: loss,
            gradients and moved variables. This happens for the first batch of each `fit`, for updates 2, 4, 8, ..., and
            for batches of a new kind. The rows are chosen to differ: missing labels, uneven weights, rare classes,
            extremes. Both sides draw the same random numbers; BatchNormalization has its own warning. A warning names
            what can't be compared.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no `keras.Model`, or `micro_batch_size` no int.
        ValueError: `micro_batch_size` is below 1, `batch_norm` is none of these, or the model has its own `train_step`
            or can't be cut for `"exact"`.
        NotEquivalentError: From `fit` and `train_on_batch`, before anything is trained: micro-batches give another
            update than the whole batch. The message names the layer, loss or variable that causes it.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model = micro_batched(model, 4)
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=10, verbose=0)
        >>> int(model.optimizer.iterations)                 # two batches, two updates
        2
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r} of type {type(model).__name__}.")
    if micro_batch_size != "auto":
        checked_count(micro_batch_size, "micro_batch_size")
    checked_batch_norm(batch_norm)
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"{type(model).__name__} overrides `train_step`, which micro_batched replaces. Pass a loss to `compile`, "
            "or override `compute_loss` to return a mean over rows."
        )
    if getattr(vars(model).get("call"), "exact", False):  # of an earlier call of this
        del vars(model)["call"], vars(model)["verify"]
    if batch_norm == "exact":
        remove_step(model)
        if micro_batch_size == "auto":
            raise ValueError('batch_norm="exact" needs a number of rows. Received: micro_batch_size="auto".')
        return chunked(model, micro_batch_size, batch_norm="exact", verify=verify)
    MicroBatchedStep(model, micro_batch_size, batch_norm, verify).install()
    return model
