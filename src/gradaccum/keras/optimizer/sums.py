"""The sums of gradients in the open window of a Keras optimizer: their variables, and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

__all__ = ["added", "made", "means"]


def made(optimizer: Any, beside: Callable[[Any, Any], Any]) -> list[Any]:
    """Variables for the sums, one for each trainable variable and `beside` it, with at least 32 bits."""
    sums = []
    for variable in optimizer._trainable_variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        path = getattr(variable, "path", variable.name).replace("/", "_").replace(":", "_")
        with beside(optimizer, variable):
            total = optimizer.add_variable(
                variable.shape,
                "zeros",
                "float32" if dtype in ("float16", "bfloat16") else dtype,
                layout=getattr(variable, "_layout", None),
                name=f"{path}_gradient_sum",
            )
        sums.append(total)
    return sums


def added(optimizer: Any, total: Any, gradient: Any, variable: Any, weight: Any) -> Any:
    """A sum with one more gradient in it, `weight` times (None: once)."""
    gradient = ops.cast(gradient, total.dtype)
    if optimizer._overwrite_variable_with_gradient(variable):
        # Not a gradient, but the variable's next value, such as the largest entry seen (float8 scaling).
        return ops.maximum(total, gradient)
    return total + (gradient if weight is None else gradient * ops.cast(weight, total.dtype))


def means(optimizer: Any, sums: Sequence[Any], weight: Any) -> list[Any]:
    """The finished gradients, in the dtype of their variables."""
    finished = []
    for total, variable in zip(sums, optimizer._trainable_variables):
        if not optimizer._overwrite_variable_with_gradient(variable):
            total = total / ops.cast(weight, total.dtype)
        finished.append(ops.cast(total, variable.dtype))
    return finished
