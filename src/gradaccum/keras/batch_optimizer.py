"""An optimizer that is told sizes in rows: the batch that fits, the batch that is wanted, and the epoch."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Any

import keras

from gradaccum.core.window import counted
from gradaccum.keras.batch_norm import batch_norms_of
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizer import Counts, Optimizer, StepsRule, where, wrapped_optimizer
from gradaccum.schedule import Schedule, checked_count, steps_for

logger = logging.getLogger("gradaccum")


class SizesRule(StepsRule):
    """A window closes with the micro-batch that reaches the desired rows, or with the epoch's last one."""

    fixed = True

    def __init__(self, maximum_batch_size: int, desired_batch_size: int, train_size: int, model: Any = None) -> None:
        self.maximum_batch_size = checked_count(maximum_batch_size, "maximum_batch_size")
        self.desired_batch_size = checked_count(desired_batch_size, "desired_batch_size")
        self.train_size = self.rows_of_epoch = checked_count(train_size, "train_size")
        self._model = model
        self._batches = -(-train_size // maximum_batch_size)
        super().__init__(Schedule(steps_for(desired_batch_size, maximum_batch_size)))

    def add(self, counts: Counts, rows: Any) -> tuple[Counts, Any, Any]:
        """The same; rows that are not known are as many as were promised."""
        left, most = counts.rows_left, self.maximum_batch_size
        rows = where(left < most, left, most) if rows is None else rows
        counts = counted(counts, rows, updated=0, unit=1, rows_left=left - rows)
        return counts, rows, (counts.weight >= self.desired_batch_size) | (counts.rows_left <= 0)

    def closed(self, counts: Counts, updated: Any) -> Counts:
        """The counts of the window that follows; in the next epoch, less the rows that were too many in this one."""
        rows_left = where(counts.rows_left <= 0, counts.rows_left + self.train_size, counts.rows_left)
        return super().closed(counts, updated)._replace(rows_left=rows_left)

    def check_batches(self, batches: int) -> None:
        if batches != self._batches:
            raise ValueError(
                f"An epoch of train_size={self.train_size} rows has {self._batches} micro-batches of "
                f"maximum_batch_size={self.maximum_batch_size}. Received: {batches} micro-batches. Pass "
                "batch_size=maximum_batch_size to fit(), and to BatchOptimizer the `train_size` that is left after the "
                "validation split."
            )

    def check_epoch(self, counts: Counts, batches: int, doubt: int = 0) -> None:
        if abs(batches - self._batches) > doubt:
            self.check_batches(batches)
        if counts.rows_left != self.train_size:
            raise ValueError(
                f"`train_size` must be the rows of an epoch. Received: train_size={self.train_size}, but the {batches} "
                "micro-batches of the epoch add up to another number. Pass the number of rows that fit() trains on."
            )

    def settings(self) -> list[list[int]]:
        return [[self.maximum_batch_size, self.desired_batch_size, self.train_size]]

    def check_variables(self, variables: Sequence[Any]) -> None:
        """Whether these are the trainable ones of the model that the rule was made for."""
        if self._model is not None and {*map(id, self._model.trainable_variables)} != {*map(id, variables)}:
            raise ValueError(
                f"This BatchOptimizer was made for another model, {self._model.name!r}. Received: the variables "
                f"{[getattr(v, 'path', v.name) for v in variables][:4]} ..., which are not the trainable ones of that "
                "model. Pass the model that is compiled with it."
            )


@keras.saving.register_keras_serializable(package="gradaccum")
class BatchOptimizer(Optimizer):
    """An optimizer that reaches the desired batch size in micro-batches of the largest size that fits.

    A window closes with the micro-batch that brings it to `desired_batch_size` rows, or with the epoch's last one. Its
    gradient is `sum_i rows_i g_i / sum_i rows_i`, so that a ragged last micro-batch and a short last window are exact
    for any sizes. No callback is needed, because `train_size` sets where an epoch ends.

    Use it with `fit(batch_size=maximum_batch_size)`. The number of micro-batches and of rows in each epoch is checked.

    Args:
        optimizer: The inner optimizer, any `keras.optimizers.Optimizer`.
        maximum_batch_size: Rows of a micro-batch.
        desired_batch_size: Rows of an update. Unless it is a multiple of the maximum, windows are rounded up to whole
            micro-batches, and a line in the log states the effective size.
        train_size: Rows of an epoch, without those of a validation split.
        model: The model to be trained. Without it, after `load_model`, sizes are not checked: a line in the log names a
            `fit` that ends inside of an epoch.
        name: The name of this wrapper.

    Raises:
        TypeError: A size is not an int, or `model` is not a Keras model.
        ValueError: A size is below 1.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> optimizer = BatchOptimizer(keras.optimizers.Adam(), 16, 64, 100, model)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> history = model.fit(np.zeros((100, 3)), np.zeros((100, 1)), batch_size=16, verbose=0)
        >>> int(optimizer.iterations)      # an update from 64 rows, and one from 36
        2
    """

    def __init__(
        self,
        optimizer: Any,
        maximum_batch_size: int,
        desired_batch_size: int,
        train_size: int,
        model: Any = None,
        *,
        name: str | None = None,
    ) -> None:
        if model is not None and not isinstance(model, keras.Model):
            raise TypeError(f"`model` must be a keras.Model. Received: model of type {type(model).__name__}.")
        self._wrap(optimizer, SizesRule(maximum_batch_size, desired_batch_size, train_size, model), name)
        if model is not None:
            self.window.name_batch_norms([layer.name for layer in batch_norms_of(model)])
            _check_every_fit(model)

    @property
    def maximum_batch_size(self) -> int:
        """Rows of a micro-batch."""
        return self.window.rule.maximum_batch_size

    @property
    def desired_batch_size(self) -> int:
        """Rows of an update."""
        return self.window.rule.desired_batch_size

    @property
    def train_size(self) -> int:
        """Rows of an epoch."""
        return self.window.rule.train_size

    def _log_wrapping(self) -> None:
        super()._log_wrapping()
        effective = min(self.schedule() * self.maximum_batch_size, self.train_size)
        if effective != self.desired_batch_size:
            logger.warning(
                "The effective batch size is %d, not the desired %d: micro-batches of %d rows, %d rows in an epoch",
                effective,
                self.desired_batch_size,
                self.maximum_batch_size,
                self.train_size,
            )

    @property
    def steps(self) -> int:
        """Micro-batches in a full window; it follows from the sizes."""
        return self.schedule()

    @steps.setter
    def steps(self, steps: int) -> None:
        raise ValueError(f"The steps of a BatchOptimizer follow from its batch sizes. Received: steps={steps!r}.")

    def finalize_variable_values(self, var_list: Any) -> None:
        super().finalize_variable_values(var_list)
        checked = not self.built or self.window.driven or sys.exc_info()[0] is not None
        if not checked and self.window.read().rows_left != self.train_size:
            self.window.warn_once(
                "fit() has ended inside of an epoch of train_size=%d rows: it was stopped there, or an epoch has "
                "another number of micro-batches, and windows have closed elsewhere than at its end. Pass `model` to "
                "BatchOptimizer to have the sizes checked.",
                self.train_size,
            )

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["steps"]
        sizes = {name: getattr(self, name) for name in ("maximum_batch_size", "desired_batch_size", "train_size")}
        return config | sizes

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("optimizer"), custom_objects=custom_objects)
        return cls(inner, **config)


def _check_every_fit(model: Any) -> None:
    """Let `model.fit` tell the model's BatchOptimizer of epochs and rows, so that these are checked."""
    fit = model.fit
    if hasattr(fit, "checks_batch_sizes"):
        return

    @functools.wraps(fit)
    def checked_fit(*args: Any, **kwargs: Any) -> Any:
        if isinstance(wrapped_optimizer(getattr(model, "optimizer", None)), BatchOptimizer):
            given = inspect.signature(fit).bind(*args, **kwargs)  # positional ones, too
            given.arguments["callbacks"] = _with_epochs(given.arguments.get("callbacks"))
            args, kwargs = given.args, given.kwargs
        return fit(*args, **kwargs)

    checked_fit.checks_batch_sizes = True  # type: ignore[attr-defined]  # a mark for the next BatchOptimizer
    model.fit = checked_fit


def _with_epochs(callbacks: Any) -> list[Any]:
    """The callbacks, with one that tells the optimizer of epochs first."""
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    given = callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])
    is_told = any(isinstance(callback, GradientAccumulation) for callback in given)
    return given if is_told else [GradientAccumulation(), *given]
