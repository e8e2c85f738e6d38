"""Wrap the optimizer: a `fit` that runs small batches makes the large batch's updates.

`Optimizer` wraps any `keras.optimizers.Optimizer`, and every one of Keras' own exists here in wrapped form:

    >>> SGD(steps=4, learning_rate=0.1).steps, SGD(4, 0.1).steps
    (4, 4)
"""

from __future__ import annotations

from typing import Any

import keras

from gradaccum.keras.batch_optimizer import BatchOptimizer
from gradaccum.keras.optimizer import LossScaledOptimizer, Optimizer
from gradaccum.schedule import Schedule, Steps, signature_with_steps

__all__ = ["BatchOptimizer", "Optimizer"]


def _named(inner: type[Any]) -> type[Optimizer]:
    """`inner`, wrapped: `steps` first or by keyword, and its own arguments."""
    base = LossScaledOptimizer if issubclass(inner, keras.optimizers.LossScaleOptimizer) else Optimizer

    def __init__(self: Optimizer, *args: Any, steps: Steps | None = None, **kwargs: Any) -> None:
        if steps is None:
            if not args:
                raise TypeError(f"`steps` is missing: {inner.__name__}(steps=4), or {inner.__name__}(4).")
            steps, args = args[0], args[1:]
        Schedule(steps)  # a wrong one shall be told before the inner optimizer is made
        optimizer = inner(*args, **kwargs)
        Optimizer.__init__(self, optimizer, steps, name=optimizer.name)

    doc = (
        f"`keras.optimizers.{inner.__name__}`, wrapped in `Optimizer`: `{inner.__name__}(steps=4, ...)`, or steps "
        f"first.\n\nTakes the arguments of `keras.optimizers.{inner.__name__}`."
    )
    names = {"__init__": __init__, "__doc__": doc, "__module__": __name__}
    wrapped = type(inner.__name__, (base,), {**names, "__signature__": signature_with_steps(inner, {})})
    return keras.saving.register_keras_serializable(package="gradaccum")(wrapped)


for _name, _inner in vars(keras.optimizers).items():
    is_one = isinstance(_inner, type) and issubclass(_inner, keras.optimizers.Optimizer)
    if is_one and _inner is not keras.optimizers.Optimizer:
        globals()[_name] = _named(_inner)
        __all__ += [_name]
