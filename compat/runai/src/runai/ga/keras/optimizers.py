"""`runai.ga.keras.optimizers`: `Optimizer` around any optimizer, and Keras' own in wrapped form."""

from __future__ import annotations

import types
import weakref
from typing import Any

import keras

import gradaccum.keras.optimizers
from gradaccum import WindowError

__all__ = ["Optimizer"]


class Window:
    """`optimizer.runai`: its `steps`, and the `step` that it is at. The inner optimizer has it too, as in the original.

    Args:
        optimizer: A wrapped optimizer of gradaccum, or a weak proxy of one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        # Files hold the numbers. A wrapped optimizer that is loaded gives its inner one a new window.
        try:
            numbers = {"steps": self.steps, "step": self.step}
        except ReferenceError:  # the wrapped optimizer is gone
            numbers = {}
        return types.SimpleNamespace, (), numbers

    @property
    def steps(self) -> int:
        """Micro-batches of this window. A new value holds from the next window on."""
        return self._optimizer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._optimizer.steps = steps

    @property
    def step(self) -> int:
        """Micro-batches that are in it, from 0 to `steps` - 1. It can be set to what it is.

        Raises:
            WindowError: It is set to another number.
        """
        return self._optimizer.micro_batches

    @step.setter
    def step(self, step: int) -> None:
        if step != self.step:
            raise WindowError(
                f"`runai.step` counts the micro-batches whose gradients are in the open window, {self.step}. Received: "
                f"step={step}. Close the window with optimizer.flush(), or load the optimizer's state with its window."
            )


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
        """`.steps` and `.step` of the open window; the original's Keras optimizers had none."""
        return Window(self)


def _named(inner: type[Any]) -> type[Optimizer]:
    """A class of the inner one's name, as in the original."""

    def __init__(self: Optimizer, *args: Any, steps: Any = None, **kwargs: Any) -> None:
        if steps is None:
            if not args:
                raise TypeError(f"`steps` is missing: {inner.__name__}(steps=4), or {inner.__name__}(4).")
            steps, args = args[0], args[1:]
        Optimizer.__init__(self, inner(*args, **kwargs), steps)

    doc = f"`keras.optimizers.{inner.__name__}`, wrapped: `{inner.__name__}(steps=4, ...)`."
    wrapped = type(inner.__name__, (Optimizer,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})
    return keras.saving.register_keras_serializable(package="runai")(wrapped)


for _name, _inner in vars(keras.optimizers).items():
    _is_one = isinstance(_inner, type) and issubclass(_inner, keras.optimizers.Optimizer)
    if _is_one and _name not in ("Optimizer", "LossScaleOptimizer"):
        globals()[_name] = _named(_inner)
        __all__ += [_name]
