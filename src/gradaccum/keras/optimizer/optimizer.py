"""The wrapper: Keras' optimizer protocol on the outside, a window of micro-batches on the inside."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.optimizers import Optimizer as KerasOptimizer

from gradaccum.keras.optimizer import checkpoint as optimizer_state
from gradaccum.keras.optimizer import sums
from gradaccum.keras.optimizer.accumulation import accumulation
from gradaccum.keras.optimizer.counts import Counts
from gradaccum.keras.optimizer.proxy import check_inner, of_inner
from gradaccum.schedule import Schedule, Steps

__all__ = ["LossScaledOptimizer", "Optimizer", "wrapped_optimizer"]

logger = logging.getLogger("gradaccum")


@keras.saving.register_keras_serializable(package="gradaccum")
class Optimizer(KerasOptimizer):
    """An optimizer that makes one update per window of micro-batches: the update of the large batch.

    Every gradient that it is given, by `fit`, `apply`, `apply_gradients` or `stateless_apply`, is one micro-batch's.
    The one that closes the window divides the sum of gradients by what it weighs,

        gradient = sum_i w_i g_i / sum_i w_i,

    and hands it to the inner optimizer, once. `iterations`, learning-rate schedules, weight decay, clipping, EMA and
    constraints are the inner optimizer's, so they count updates. `w_i` is the micro-batch's number of rows in a `fit`
    with the `GradientAccumulation` callback, which also closes the window at each epoch's end. Without it micro-batches
    weigh the same, and windows run on across epochs; what is left at the end of `fit` makes a shorter window.

    Args:
        optimizer: The inner optimizer, any `keras.optimizers.Optimizer`. It is held, and never replaced; one that has
            trained before goes on with its state.
        steps: Micro-batches in a window: an int >= 1; or `{epoch: steps}` or a callable `(epoch, update) -> steps`,
            which the `GradientAccumulation` callback drives.
        name: The name of this wrapper.

    Raises:
        TypeError: `optimizer` is none of Keras', or `steps` is of the wrong type.
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

    inner_optimizer: Any
    built: bool
    _steps_are_fixed = False
    _rows_of_epoch = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        inner = args[0] if args else kwargs.get("optimizer")
        if cls is Optimizer and isinstance(inner, keras.optimizers.LossScaleOptimizer):
            cls = LossScaledOptimizer
        return KerasOptimizer.__new__(cls)

    def __init__(self, optimizer: Any, steps: Steps, *, name: str | None = None) -> None:
        schedule = Schedule(steps)
        check_inner(optimizer)
        # Not super(): next in line may be LossScaleOptimizer. A callable learning rate makes no variable of our own.
        KerasOptimizer.__init__(self, learning_rate=lambda: optimizer.learning_rate, name=name)
        self._untrack_variable(self._iterations)  # the inner optimizer's count
        self.inner_optimizer = optimizer
        self._schedule = schedule
        self._driven = False
        self._told_of_leftovers = False
        self._watched: Any = None
        self._rows: Any = None
        self._log_wrapping()

    def _log_wrapping(self) -> None:
        inner = type(self.inner_optimizer).__name__
        logger.info("Wrapping '%s' Keras optimizer with GA of %s steps", inner, self._schedule)

    # What is the inner optimizer's.

    weight_decay = of_inner("weight_decay")
    clipnorm = of_inner("clipnorm")
    clipvalue = of_inner("clipvalue")
    global_clipnorm = of_inner("global_clipnorm")
    use_ema = of_inner("use_ema")
    ema_momentum = of_inner("ema_momentum")
    ema_overwrite_frequency = of_inner("ema_overwrite_frequency")
    loss_scale_factor = of_inner("loss_scale_factor")
    learning_rate = of_inner("learning_rate")

    @property
    def iterations(self) -> Any:
        """Updates made."""
        return self.inner_optimizer.iterations

    def __getattr__(self, name: str) -> Any:
        # Only what isn't found here. Private names are ours alone, but for the one that SwapEMAWeights reads.
        if "inner_optimizer" in self.__dict__ and (name[0] != "_" or name == "_model_variables_moving_average"):
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "steps":  # TensorFlow's tracking skips an assignment of what is read, which is this window's
            type(self).steps.fset(self, value)  # type: ignore[attr-defined]  # a property
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        # Keras saves whatever it finds here. The inner optimizer is saved with us, in the layout that it has alone.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def scale_loss(self, loss: Any) -> Any:
        return self.inner_optimizer.scale_loss(loss)

    # The window, between calls.

    @property
    def steps(self) -> int:
        """Micro-batches of this window. Setting it holds from the next window on.

        Raises:
            TypeError, ValueError: The new value is no int >= 1.
        """
        return self._read_counts().steps if self.built else self._schedule()

    @steps.setter
    def steps(self, steps: int) -> None:
        schedule = Schedule(steps)
        if schedule.constant is None:
            raise ValueError(
                f"`steps` can be set to an int >= 1. Received: steps={steps!r}. Pass a schedule to the constructor, or "
                "to the GradientAccumulation callback."
            )
        self._schedule = schedule
        self._plan(schedule.constant)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in the open window; 0 between windows."""
        return self._read_counts().micro_batches if self.built else 0

    @property
    def updated(self) -> bool:
        """Whether the last micro-batch, or `flush()`, made an update."""
        return self.built and bool(self._read_counts().updated)

    def flush(self) -> bool:
        """Close the open window with what it holds: a shorter window, divided by what it weighs.

        For use between training steps; in a custom JAX loop, after the state is back in the variables.

        Returns:
            Whether there was one, and it made an update.
        """
        if not self.micro_batches:
            return False
        accumulation.close(self)
        return self.updated

    def _plan(self, steps: int) -> None:
        """Let the next window, or this one if it is still empty, have so many steps."""
        if self.built:
            counts = self._read_counts()
            steps_now = counts.steps if counts.micro_batches else steps
            self._write_counts(counts._replace(steps=steps_now, next_steps=steps))
        else:
            self._first_steps = steps

    def _read_counts(self) -> Counts:
        return Counts(*ops.convert_to_numpy(self._counts.value).tolist())

    def _write_counts(self, counts: Counts) -> None:
        self._counts.assign(np.asarray(counts))

    # The rules of a window, in arithmetic that numbers and traced scalars understand.

    def _weigh(self, counts: Counts, rows: Any) -> Any:
        """What a micro-batch of so many rows weighs; None for both: not known, and all the same."""
        return rows

    def _add(self, counts: Counts, weight: Any) -> tuple[Counts, Any]:
        """The counts with one more micro-batch of this weight, and whether it closes the window."""
        counts = counts.added(1 if weight is None else weight)
        return counts, counts.micro_batches >= counts.steps

    def _settings(self) -> list[list[int]]:
        """What a window's length follows from; nothing for a callable."""
        return [] if self._schedule.largest is None else self._schedule.to_pairs()

    def _closed(self, counts: Counts, updated: Any) -> Counts:
        """The counts of the window after this one."""
        return counts.closed(updated)

    def _begin_epoch(self) -> None:
        """An epoch's first micro-batch comes next."""

    # Keras' protocol.

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        inner = self.inner_optimizer
        self._check_variables(variables)
        if not inner.built:
            inner.build(variables)
        elif [inner._var_key(v) for v in variables] != [inner._var_key(v) for v in inner._trainable_variables]:
            raise ValueError(
                f"The inner optimizer {inner.name!r} was built for other variables than this model's trainable ones. "
                f"Received: {len(variables)} variables, it holds {len(inner._trainable_variables)}. Use a new "
                "optimizer for a new model."
            )
        self.__dict__["_trainable_variables"] = list(variables)
        for index, variable in enumerate(variables):
            self._trainable_variables_indices[self._var_key(variable)] = index
        self._add_window()
        self.built = True

    def _add_window(self) -> None:
        """Make the variables of the window: its sums, and what it has seen."""
        counts = Counts.opened(self.__dict__.pop("_first_steps", self._schedule()), self._rows_of_epoch)
        with accumulation.host():
            self._counts = self.add_variable(
                (len(counts),), keras.initializers.Constant(np.asarray(counts)), "int", name="window_counts"
            )
            # Which variables have had a gradient in this window, as 0 and 1.
            self._touched = self.add_variable((len(self._trainable_variables),), "zeros", "int", name="window_touched")
        self._sums = sums.made(self, accumulation.beside)

    def _check_variables(self, variables: Sequence[Any]) -> None:
        """Whether these may be trained; for subclasses."""

    @property
    def variables(self) -> list[Any]:
        return self.inner_optimizer.variables + self._variables

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:
            return
        gradients = self._by_variable(grads, trainable_variables)
        if all(gradient is None for gradient in gradients):
            raise ValueError("No gradients provided for any variable.")
        self._check_driven()
        accumulation.accumulate(self, gradients, self._rows_now())

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
                f"There must be one gradient per variable. Received: {len(grads)} gradients for {len(variables)} "
                "variables."
            )
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        gradients = [None] * len(self._trainable_variables)
        for gradient, variable in zip(grads, variables):
            gradients[self._get_variable_index(variable)] = gradient
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
        """The end of `fit`: close the window that is left open, then what the inner optimizer does there."""
        if sys.exc_info()[0] is not None:
            # JAX gets here after an error too, perhaps with no values in the variables. What that brings up must not
            # hide the error; and a window that was interrupted stays open.
            with contextlib.suppress(Exception):
                self.inner_optimizer.finalize_variable_values(var_list)
            return
        self._check_driven()
        held, steps = self.micro_batches, self.steps
        if self.flush() and not self._driven and not self._told_of_leftovers:
            self._told_of_leftovers = True
            logger.warning(
                "The end of fit() closed a window of %d of %d micro-batches. With "
                "callbacks=[gradaccum.keras.callbacks.GradientAccumulation()] every epoch closes its last window, "
                "and micro-batches weigh as many as their rows.",
                held,
                steps,
            )
        if self.built:
            self.inner_optimizer.finalize_variable_values(var_list)

    def set_weights(self, weights: Sequence[Any]) -> None:
        if not self.built:
            raise ValueError("The optimizer must be built before set_weights(). Call optimizer.build(variables) first.")
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        optimizer_state.save(self, store)

    def load_own_variables(self, store: Any) -> None:
        optimizer_state.load(self, store)

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "optimizer": inner, "steps": optimizer_state.steps_config(self._schedule)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("optimizer"), custom_objects=custom_objects)
        steps = optimizer_state.steps_from_config(config.pop("steps"), custom_objects)
        self = Optimizer.__new__(cls, inner)
        Optimizer.__init__(self, inner, steps, **config)
        return self

    # What drives it.

    def _check_driven(self) -> None:
        if self._schedule.constant is None and not self._driven:
            raise ValueError(
                f"A schedule needs to be told of epochs. Received: steps={self._schedule}. Call "
                "fit(..., callbacks=[gradaccum.keras.callbacks.GradientAccumulation()]), or set `optimizer.steps` by "
                "yourself in a loop of your own."
            )

    @contextlib.contextmanager
    def _with_rows(self, rows: Any) -> Iterator[None]:
        """The micro-batch of the training step in here has so many rows."""
        replica = accumulation.replica()
        before = self._rows or {}
        self.__dict__["_rows"] = {**before, replica: rows}
        try:
            yield
        finally:
            self.__dict__["_rows"] = {key: value for key, value in (self._rows or {}).items() if key != replica}

    def _rows_now(self) -> Any:
        return (self._rows or {}).get(accumulation.replica())

    # What the accumulation of each backend asks.

    @property
    def _can_skip(self) -> bool:
        """Whether a window may close without an update."""
        return isinstance(self.inner_optimizer, keras.optimizers.LossScaleOptimizer)


@keras.saving.register_keras_serializable(package="gradaccum")
class LossScaledOptimizer(Optimizer, keras.optimizers.LossScaleOptimizer):
    """An `Optimizer` around a `LossScaleOptimizer`, made by `Optimizer` itself.

    It is one of those too, for `compile` would otherwise put a second one around it under `mixed_float16`.
    """


def wrapped_optimizer(optimizer: Any) -> Optimizer | None:
    """The `Optimizer` in what a model was compiled with: itself, or inside a LossScaleOptimizer; else None."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer
