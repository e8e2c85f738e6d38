"""`runai.ga.keras.optimizers`: `Optimizer` around any optimizer, and Keras' own by name, wrapped already."""

from __future__ import annotations

import weakref
from typing import Any

import keras

import gradaccum.keras.optimizers
from runai.ga.window import Window

__all__ = ["Optimizer"]


@keras.saving.register_keras_serializable(package="runai")
class Optimizer(gradaccum.keras.optimizers.Optimizer):
    """`gradaccum.keras.optimizers.Optimizer`, as Run:AI's library had it: `Optimizer(optimizer, steps=4)`.

    Args:
        optimizer: The inner optimizer.
        steps: Micro-batches of a window.

    Example:
        >>> optimizer = Optimizer(keras.optimizers.Adam(), steps=4)
        Wrapping 'Adam' Keras optimizer with GA of 4 steps
        >>> optimizer.runai.steps, optimizer.runai.step
        (4, 0)
    """

    def __init__(self, optimizer: Any, steps: Any, **kwargs: Any) -> None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "A LossScaleOptimizer goes around this optimizer, where compile() puts it, not inside. For one inside "
                "use gradaccum.keras.optimizers.Optimizer."
            )
        super().__init__(optimizer, steps, **kwargs)

    def _wrap(self, optimizer: Any, *arguments: Any) -> None:
        super()._wrap(optimizer, *arguments)
        vars(optimizer)["runai"] = Window(weakref.proxy(self))  # for a custom optimizer that reads it in its step

    def _log_wrapping(self) -> None:
        super()._log_wrapping()
        print(f"Wrapping '{type(self.inner_optimizer).__name__}' Keras optimizer with GA of {self.schedule} steps")

    def __dir__(self) -> list[str]:
        # Keras saves whatever it finds here, and `optimizer` is saved already.
        return [name for name in super().__dir__() if name != "optimizer"]

    @property
    def optimizer(self) -> Any:
        """The inner optimizer."""
        return self.inner_optimizer

    @property
    def runai(self) -> Window:
        """`.steps` and `.step` of the window."""
        return Window(self)


def __getattr__(name: str) -> Any:
    inner = getattr(keras.optimizers, name, None)
    if not (isinstance(inner, type) and issubclass(inner, keras.optimizers.Optimizer)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def wrapped(*args: Any, steps: Any = None, **kwargs: Any) -> Optimizer:
        if steps is None:
            if not args:
                raise TypeError(f"`steps` is missing: {name}(steps=4), or {name}(4).")
            steps, args = args[0], args[1:]
        return Optimizer(inner(*args, **kwargs), steps)

    wrapped.__name__, wrapped.__doc__ = name, f"`keras.optimizers.{name}`, wrapped: `{name}(steps=4, ...)`."
    return wrapped


def __dir__() -> list[str]:
    return dir(gradaccum.keras.optimizers)
