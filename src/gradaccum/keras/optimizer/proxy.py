"""What belongs to the inner optimizer: its settings, its count of updates and other attributes; what can be wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras.optimizers import Optimizer as KerasOptimizer

__all__ = ["OptimizerProxy", "check_inner", "inside"]


def _of_inner(name: str) -> Any:
    """A setting that is the inner optimizer's, to read and to write."""

    def read(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def write(self: Any, value: Any) -> None:
        # Keras' own constructor writes defaults, before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"`{name}` of the inner optimizer.")


class OptimizerProxy(KerasOptimizer):
    """A Keras optimizer that holds another one, whose settings and attributes are its own."""

    inner_optimizer: Any

    def __init__(self, optimizer: Any, name: str | None) -> None:
        check_inner(optimizer)
        # Not super(): next in line may be LossScaleOptimizer. A callable learning rate makes no variable of our own.
        KerasOptimizer.__init__(self, learning_rate=lambda: optimizer.learning_rate, name=name)
        self.inner_optimizer = optimizer

    weight_decay = _of_inner("weight_decay")
    clipnorm = _of_inner("clipnorm")
    clipvalue = _of_inner("clipvalue")
    global_clipnorm = _of_inner("global_clipnorm")
    use_ema = _of_inner("use_ema")
    ema_momentum = _of_inner("ema_momentum")
    ema_overwrite_frequency = _of_inner("ema_overwrite_frequency")
    loss_scale_factor = _of_inner("loss_scale_factor")
    learning_rate = _of_inner("learning_rate")

    @property
    def iterations(self) -> Any:
        """Updates made."""
        return self.inner_optimizer.iterations

    def __getattr__(self, name: str) -> Any:
        # Only what isn't found here. Private names are ours alone, but for the one that SwapEMAWeights reads.
        if "inner_optimizer" in self.__dict__ and (name[0] != "_" or name == "_model_variables_moving_average"):
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        # Keras saves whatever it finds here. The inner optimizer is saved with us, in the layout that it has alone.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def scale_loss(self, loss: Any) -> Any:
        return self.inner_optimizer.scale_loss(loss)


def check_inner(optimizer: Any) -> None:
    """Whether this can be wrapped."""
    if not isinstance(optimizer, KerasOptimizer):
        where = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        hint = " For a PyTorch optimizer use gradaccum.torch.optim." if where.startswith("torch.") else ""
        raise TypeError(
            f"`optimizer` must be a keras.optimizers.Optimizer of the {keras.backend.backend()} backend. Received: "
            f"{optimizer!r} of type {where}.{hint}"
        )
    for inner in inside(optimizer):
        if isinstance(inner, OptimizerProxy):
            raise ValueError(f"`optimizer` accumulates already, over {inner.schedule} steps. Wrap it once.")
        if getattr(inner, "gradient_accumulation_steps", None):
            raise ValueError(
                "`optimizer` must not accumulate by itself. Received: "
                f"{type(inner).__name__}(gradient_accumulation_steps={inner.gradient_accumulation_steps}). "
                "Leave that argument out, and pass `steps` here."
            )


def inside(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it is made of; of a `MultiOptimizer` with a function, those of variables so far."""
    yield optimizer
    for inner in [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]:
        if inner is not None:
            yield from inside(inner)
