"""The wrapper: Keras' optimizer protocol on the outside, a window of micro-batches on the inside."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers import Optimizer as KerasOptimizer

from gradaccum.keras import backends, private
from gradaccum.keras.optimizer.window import StepsRule, Window
from gradaccum.schedule import Schedule, Steps

logger = logging.getLogger("gradaccum")


def _of_inner(name: str) -> Any:
    """A setting that is the inner optimizer's, to read and to write."""

    def read(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def write(self: Any, value: Any) -> None:
        # Keras' own constructor writes defaults, before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"`{name}` of the inner optimizer.")


@keras.saving.register_keras_serializable(package="gradaccum")
class Optimizer(KerasOptimizer):
    """An optimizer that makes one update per window of micro-batches: the update of the large batch.

    Every gradient from `fit`, `apply`, `apply_gradients` or `stateless_apply` is one micro-batch's. The one that closes
    the window divides the sum of gradients by its weight,

        gradient = sum_i w_i g_i / sum_i w_i,

    and the inner optimizer takes it, once. `iterations`, learning-rate schedules, weight decay, clipping, EMA and
    constraints are the inner optimizer's, so they count updates. `w_i` is the micro-batch's number of rows in a `fit`
    with the `GradientAccumulation` callback, which also closes the window at each epoch's end. Without it micro-batches
    weigh the same, windows run on across epochs, and the rest at the end of `fit` makes a shorter window.

    Args:
        optimizer: The inner optimizer, any `keras.optimizers.Optimizer`. It stays the same object; one that has trained
            before keeps its state.
        steps: Micro-batches in a window: an int >= 1; or `{epoch: steps}` or a callable `(epoch, update) -> steps`,
            which the `GradientAccumulation` callback drives.
        name: The name of this wrapper.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer, or `steps` is of the wrong type.
        ValueError: `optimizer` accumulates by itself, or `steps` is out of range.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> optimizer = Optimizer(keras.optimizers.Adam(), steps=4)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> x, y = np.zeros((64, 3)), np.zeros((64, 1))
        >>> history = model.fit(x, y, batch_size=8, verbose=0)
        >>> int(optimizer.iterations)
        2
    """

    built: bool
    inner_optimizer: Any

    weight_decay, learning_rate = _of_inner("weight_decay"), _of_inner("learning_rate")
    clipnorm, clipvalue, global_clipnorm = map(_of_inner, ("clipnorm", "clipvalue", "global_clipnorm"))
    use_ema, ema_momentum = _of_inner("use_ema"), _of_inner("ema_momentum")
    ema_overwrite_frequency, loss_scale_factor = _of_inner("ema_overwrite_frequency"), _of_inner("loss_scale_factor")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        inner = args[0] if args else kwargs.get("optimizer")
        if cls is Optimizer and isinstance(inner, keras.optimizers.LossScaleOptimizer):
            cls = LossScaledOptimizer
        return KerasOptimizer.__new__(cls)

    def __init__(self, optimizer: Any, steps: Steps, *, name: str | None = None) -> None:
        self._wrap(optimizer, StepsRule(Schedule(steps)), name)

    def _wrap(self, optimizer: Any, rule: StepsRule, name: str | None) -> None:
        _check_inner(optimizer)
        # Not super(): next in line may be LossScaleOptimizer. A callable learning rate makes no variable of our own.
        KerasOptimizer.__init__(self, learning_rate=lambda: optimizer.learning_rate, name=name)
        self.window = Window(optimizer, rule, backends.running().place_of(self))
        self.inner_optimizer = optimizer  # last: see __setattr__
        self._log_wrapping()

    def _log_wrapping(self) -> None:
        inner = type(self.inner_optimizer).__name__
        logger.info("Wrapping '%s' Keras optimizer with GA of %s steps", inner, self.schedule)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "steps":  # TensorFlow's tracking skips an assignment of what is read, which is this window's
            type(self).steps.fset(self, value)  # type: ignore[attr-defined]  # a property
        elif name == "gradient_accumulation_steps" and value is not None:
            raise ValueError(
                "The optimizer is wrapped already and accumulates over windows of its own. Received: "
                f"gradient_accumulation_steps={value!r}. Set `optimizer.steps`."
            )
        elif self._reads_from_inner(name):  # such as `momentum`: written here, it would be read here and do nothing
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def _reads_from_inner(self, name: str) -> bool:
        own = name[0] == "_" or name in self.__dict__ or hasattr(type(self), name)
        return not own and hasattr(self.__dict__.get("inner_optimizer"), name)

    def __getattr__(self, name: str) -> Any:
        # Only what isn't found here. Private names are ours alone, but for the one that SwapEMAWeights reads.
        if "inner_optimizer" in self.__dict__ and (name[0] != "_" or name == "_model_variables_moving_average"):
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        # Keras saves whatever it finds here. The inner optimizer is saved with us, in the layout that it has alone.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    # The window, between calls.

    @property
    def schedule(self) -> Schedule:
        """The `steps` that it was made with, or that were set last."""
        return self.window.rule.schedule

    @property
    def steps(self) -> int:
        """Micro-batches of this window. A new value holds from the next window on.

        Raises:
            TypeError, ValueError: The new value is not an int >= 1.
        """
        return self.window.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        schedule = Schedule(steps)
        if schedule.constant is None:
            raise ValueError(
                f"`optimizer.steps` can be set to an int >= 1. Received: steps={steps!r}. Pass a schedule to the "
                "constructor, or to the GradientAccumulation callback."
            )
        self.window.rule.schedule = schedule
        self.window.plan(schedule.constant)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in the open window; 0 between windows."""
        return self.window.read().micro_batches if self.built else 0

    @property
    def updated(self) -> bool:
        """Whether the last micro-batch, or `flush()`, made an update."""
        return self.built and bool(self.window.read().updated)

    def flush(self) -> bool:
        """Close the open window with what it holds: a shorter window, divided by its weight.

        For use between training steps; in a custom JAX loop, after the state is back in the variables.

        Returns:
            Whether an update was made.
        """
        if not self.micro_batches:
            return False
        backends.running().close(self.window)
        return self.updated

    # Keras' protocol.

    @property
    def iterations(self) -> Any:
        """Updates made."""
        return self.inner_optimizer.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def scale_loss(self, loss: Any) -> Any:
        return self.inner_optimizer.scale_loss(loss)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        inner = self.inner_optimizer
        self.window.rule.check_variables(variables)
        if not inner.built:
            inner.build(variables)
            _check_inner(inner)  # a MultiOptimizer with a function has its optimizers only now
        elif not private.is_built_for(inner, variables):
            raise ValueError(
                f"The inner optimizer {inner.name!r} was built for other variables than this model's trainable ones. "
                f"Received: {len(variables)} variables. Use a new optimizer for a new model."
            )
        self.__dict__["_trainable_variables"] = list(variables)
        self.__dict__["_trainable_variables_indices"] = {id(variable): i for i, variable in enumerate(variables)}
        self.window.build(variables, self.add_variable)
        self.built = True
        self.window.name_batch_norms(_batch_norms_by_name(variables))

    @property
    def variables(self) -> list[Any]:
        # Not the count that Keras gave us. It stays in the list: TensorFlow saves no list that has lost an element.
        return self.inner_optimizer.variables + [one for one in self._variables if one is not self._iterations]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:
            return
        gradients = self._by_variable(grads, trainable_variables)
        if all(gradient is None for gradient in gradients):
            raise ValueError("No gradients provided for any variable: check that the loss depends on them.")
        self._check_driven()
        self.window.add(gradients)

    def _by_variable(self, grads: list[Any], variables: Any) -> list[Any]:
        """The gradients in the order of our own variables; None for those that have none."""
        if variables is None and not self.built:
            raise ValueError(
                "The optimizer must be built before it is given gradients without variables. "
                "Call optimizer.build(model.trainable_variables) first."
            )
        variables = self._trainable_variables if variables is None else list(variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"Pass one gradient per variable. Received: {len(grads)} gradients for {len(variables)} variables."
            )
        if not self.built:
            self.build(variables)
        indices = self._trainable_variables_indices
        gradients = [None] * len(indices)
        for gradient, variable in zip(grads, variables):
            if id(variable) not in indices:
                raise ValueError(
                    f"Unknown variable: {variable}. An optimizer trains the variables that it was built with. Use a "
                    "new one for another model."
                )
            if isinstance(gradient, (np.ndarray, list, float)):
                gradient = keras.ops.convert_to_tensor(gradient, variable.dtype)
            gradients[indices[id(variable)]] = gradient
        return gradients

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars)
        self.apply(grads, variables)
        return self.iterations

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        # LossScaleOptimizer hands over our Variables, whose values only its own scope knows.
        values = [v.value if isinstance(v, keras.Variable) else v for v in optimizer_variables]
        return KerasOptimizer.stateless_apply(self, values, grads, trainable_variables)

    def finalize_variable_values(self, var_list: Any) -> None:
        """At the end of `fit`, close the open window, then finalize the inner optimizer."""
        if sys.exc_info()[0] is not None:
            # JAX gets here after an error too, perhaps with no values in the variables: that must not hide the error,
            # and a window that was interrupted stays open.
            with contextlib.suppress(Exception):
                self._finalize(var_list)
            return
        self._check_driven()
        held, steps = self.micro_batches, self.steps
        if self.flush() and not self.window.driven:
            self.window.warn_once(
                "The end of fit() closed a window of %d of %d micro-batches. With "
                "callbacks=[gradaccum.keras.callbacks.GradientAccumulation()] every epoch closes its last window, "
                "and micro-batches are weighed by their rows.",
                held,
                steps,
            )
        if self.built:
            self._finalize(var_list)

    def _finalize(self, variables: Sequence[Any]) -> None:
        if int(keras.ops.convert_to_numpy(self.iterations)) > 0:  # averages are zeros before
            self.inner_optimizer.finalize_variable_values(variables)
            backends.running().separate(variables, self.inner_optimizer.variables)

    def set_weights(self, weights: Sequence[Any]) -> None:
        if not self.built:
            raise ValueError("The optimizer must be built before set_weights(). Call optimizer.build(variables) first.")
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        self.window.save(store)

    def load_own_variables(self, store: Any) -> None:
        self.window.load(store)

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "optimizer": inner, "steps": _steps_config(self.schedule)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        if not isinstance(config, dict) or not {"optimizer", "steps"} <= config.keys():
            found = [*config] if isinstance(config, dict) else repr(config)
            raise ValueError(f"An Optimizer's config must have 'optimizer' and 'steps'. Received: {found}.")
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("optimizer"), custom_objects=custom_objects)
        steps = config.pop("steps")
        if isinstance(steps, list):
            steps = Schedule.from_pairs(steps)
        else:
            steps = keras.saving.deserialize_keras_object(steps, custom_objects=custom_objects)
        self = Optimizer.__new__(cls, inner)
        Optimizer.__init__(self, inner, steps, **config)
        return self

    def _check_driven(self) -> None:
        if self.schedule.constant is None and not self.window.driven:
            raise ValueError(
                f"A schedule needs to know epochs. Received: steps={self.schedule}. Call "
                "fit(..., callbacks=[gradaccum.keras.callbacks.GradientAccumulation()]), or set `optimizer.steps` in a "
                "loop of your own."
            )


@keras.saving.register_keras_serializable(package="gradaccum")
class LossScaledOptimizer(Optimizer, keras.optimizers.LossScaleOptimizer):
    """An `Optimizer` around a `LossScaleOptimizer`, made by `Optimizer` itself.

    It is one of those too, for `compile` would otherwise put a second one around it under `mixed_float16`.
    """

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)
        # SwapEMAWeights asks the optimizer inside of this one for the averages.
        for inner in _inside(self.inner_optimizer):
            if private.averages_of(inner) is not None:
                private.lend_averages(self.inner_optimizer, private.averages_of(inner))


def _check_inner(optimizer: Any) -> None:
    """Whether this can be wrapped."""
    if not isinstance(optimizer, KerasOptimizer):
        where = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        hint = " For a PyTorch optimizer use gradaccum.torch.optim." if where.startswith("torch.") else ""
        raise TypeError(
            f"`optimizer` must be a keras.optimizers.Optimizer of the {keras.backend.backend()} backend. Received: "
            f"{optimizer!r} of type {where}.{hint}"
        )
    for inner in _inside(optimizer):
        if isinstance(inner, Optimizer):
            raise ValueError(
                f"`optimizer` is wrapped already and accumulates over {inner.schedule} steps. Wrap it once."
            )
        if getattr(inner, "gradient_accumulation_steps", None):
            raise ValueError(
                "`optimizer` must not accumulate by itself, or both windows would multiply. Received: "
                f"{type(inner).__name__}(gradient_accumulation_steps={inner.gradient_accumulation_steps}). "
                "Leave that argument out, and pass `steps` here."
            )


def _inside(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it is made of; of a `MultiOptimizer` with a function, those of variables so far."""
    yield optimizer
    for inner in [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]:
        if inner is not None:
            yield from _inside(inner)


def _batch_norms_by_name(variables: Sequence[Any]) -> list[str]:
    """Layers of these variables that are named like a BatchNormalization. The callback sees layers, and finds all."""
    parts = [getattr(variable, "path", "").split("/")[-2:] for variable in variables]
    found = [layer for layer, name in (part for part in parts if len(part) == 2) if name in ("gamma", "beta")]
    return [name for name in dict.fromkeys(found) if re.search(r"batch_?norm|(^|_)bn(_|\d|$)", name.lower())]


def wrapped_optimizer(optimizer: Any) -> Optimizer | None:
    """The `Optimizer` in what a model was compiled with: itself, or inside a LossScaleOptimizer; else None."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def _steps_config(schedule: Schedule) -> Any:
    """`steps`, as a config can hold it: JSON would turn the epochs of a dict into strings."""
    if schedule.constant is not None:
        return schedule.constant
    if schedule.largest is not None:
        return schedule.to_pairs()
    return keras.saving.serialize_keras_object(schedule.function)
