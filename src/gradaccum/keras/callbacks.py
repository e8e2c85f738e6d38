"""What only `fit` knows: when an epoch begins and ends, and how many rows a micro-batch has."""

from __future__ import annotations

import logging
from typing import Any

import keras

from gradaccum.errors import WindowError
from gradaccum.keras.batch_norm import batch_norms_of
from gradaccum.keras.optimizer import Optimizer, RowWatch, wrapped_optimizer
from gradaccum.keras.private import compiled_losses, loss_entries
from gradaccum.schedule import Schedule, Steps

__all__ = ["GradientAccumulation"]

logger = logging.getLogger("gradaccum")


class GradientAccumulation(keras.callbacks.Callback):
    """Closes the window at each epoch's end, weighs micro-batches by their rows, and applies a schedule.

    A short last window, and a ragged last micro-batch, are divided by the rows that they hold. Where `fit` knows the
    number of batches, the epoch's last window closes with its last batch, before validation and before any callback's
    `on_epoch_end`. Where it doesn't (a generator), or the epoch ends earlier (`stop_training`), it closes in this
    callback's `on_epoch_end`: list it before those that save or read the model there.

    Args:
        steps: Micro-batches in a window, in place of the optimizer's own: an int, `{epoch: steps}`, or a callable
            `(epoch, update) -> steps`, asked when a window opens; `update` counts from the start of training. None
            keeps the optimizer's. Another length compiles nothing anew. A callable costs one look at the device per
            micro-batch.

    Raises:
        TypeError, ValueError: `steps` is none of these; or the model's optimizer is not one of
            `gradaccum.keras.optimizers`.

    Example:
        >>> import numpy as np, gradaccum.keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(gradaccum.keras.optimizers.Adam(steps=4), loss="mse")
        >>> x, y = np.zeros((50, 3)), np.zeros((50, 1))
        >>> callback = gradaccum.keras.callbacks.GradientAccumulation({0: 8, 1: 2})
        >>> history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
        >>> int(model.optimizer.iterations)      # a window of 7, then windows of 2, 2, 2 and 1
        5
    """

    def __init__(self, steps: Steps | None = None) -> None:
        super().__init__()
        self._schedule = None if steps is None else Schedule(steps)
        self._optimizer: Optimizer | None = None
        self._rows: RowWatch | None = None
        self._epoch = 0
        self._in_epoch = False
        self._told_of_short_epochs = False
        self._drops_micro_batches = False
        self._batches = 0  # of this epoch
        self._in_window = 0  # micro-batches of this window, dropped ones too
        self._steps = self._next_steps = 1  # of this window, and of the next one

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer = wrapped_optimizer(getattr(model, "optimizer", None))
        if optimizer is None:
            raise ValueError(
                "The GradientAccumulation callback needs a model whose optimizer is wrapped. Received: "
                f"{type(getattr(model, 'optimizer', None)).__name__}. Compile it with "
                "gradaccum.keras.optimizers.Optimizer(optimizer, steps=4)."
            )
        if self._schedule is not None and optimizer.window.rule.fixed:
            raise ValueError(
                f"The steps of a {type(optimizer).__name__} follow from its batch sizes. Received: "
                f"GradientAccumulation({self._schedule}). Use Optimizer(optimizer, steps=...) for a schedule."
            )
        self._optimizer = optimizer
        optimizer.window.loaded = False

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self._wrapped
        schedule = self._schedule or optimizer.schedule
        per_execution = getattr(self._model, "steps_per_execution", 1)
        if schedule.largest is None and per_execution > 1:
            raise ValueError(
                "A callable schedule is asked between micro-batches, which needs steps_per_execution=1. Received: "
                f"steps_per_execution={per_execution}. Use {{epoch: steps}}, or compile with 1."
            )
        window = optimizer.window
        other, window.driver = window.driver, self
        if other is not None and other is not self and other.params is self.params:  # of the same fit()
            raise ValueError(
                "fit() was given two GradientAccumulation callbacks for one optimizer, which would both close its "
                f"windows. Received: a second one, with steps={self._schedule}. Keep one of them."
            )
        # What compile() puts around it under mixed_float16 drops micro-batches that overflow, without a word to us.
        self._drops_micro_batches = self._model.optimizer is not optimizer
        if self._drops_micro_batches and per_execution > 1:
            logger.warning(
                "A LossScaleOptimizer is around the optimizer, and steps_per_execution=%d: after a micro-batch that "
                "overflows, windows of this epoch begin later. Compile with steps_per_execution=1.",
                per_execution,
            )
        window.name_batch_norms([layer.name for layer in batch_norms_of(self._model)])
        if window.in_fit:
            self._discard()
        self._in_window = optimizer.micro_batches
        if self._in_window and not window.read().by_rows:
            logger.warning(
                "The open window holds %d micro-batches whose rows are not known. Each counts as many rows as the next "
                "one: if they had others, its update is not the large batch's. Call optimizer.flush() before fit() to "
                "close it first.",
                self._in_window,
            )
        self._steps = self._next_steps = optimizer.steps
        self._tell_of_losses()
        self._tell_of_other_optimizers()
        self._drive()

    def on_train_end(self, logs: Any = None) -> None:
        optimizer = self._wrapped
        optimizer.window.driven = optimizer.window.in_fit = False
        if self._rows is not None:
            self._rows.stop()
        if self._schedule is not None and optimizer.schedule.constant is not None:
            optimizer.window.plan(optimizer.schedule.constant)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        optimizer = self._wrapped
        if not optimizer.window.driven:  # a `fit` in a callback's on_epoch_end has ended since
            self._drive()
        self._discard_loaded()
        self._epoch, self._in_epoch, self._batches = epoch, True, 0
        batches = (self.params or {}).get("steps")
        if batches:
            optimizer.window.rule.check_batches(batches)
        optimizer.window.begin_epoch()
        schedule = self._schedule or optimizer.schedule
        if schedule.largest is not None and not optimizer.window.rule.fixed:
            steps = schedule(epoch)
            self._plan(steps)
            self._tell_of_short_epochs(steps)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._check_driven()
        self._wrapped.window.in_fit = True
        schedule = self._schedule or self._wrapped.schedule
        if schedule.largest is None:
            self._sync()
            if not self._wrapped.micro_batches:
                self._plan(schedule(self._epoch, int(self._wrapped.iterations)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        batches = (self.params or {}).get("steps")
        done = min(batch + 1, batches or batch + 1)  # with steps_per_execution, Keras counts beyond the epoch's end
        self._in_window += done - self._batches
        self._batches = done
        if done == batches:
            self._end_epoch()
        elif self._drops_micro_batches and self._in_window >= self._steps:
            # Close it, if it is still open: the next one begins where it would have without the dropped ones.
            self._close_window()

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._check_driven()
            self._close_window()
            self._check_epoch()

    def _drive(self) -> None:
        """Tell the window of rows from now on."""
        window = self._wrapped.window
        window.driven = True
        self._rows = RowWatch(self._model, window)
        self._rows.start()

    def _check_driven(self) -> None:
        """Whether no other `fit` has ended since the epoch began, and the window with it."""
        if not self._wrapped.window.driven:
            raise WindowError(
                "Another fit() of this model, with a GradientAccumulation callback of its own, ran inside an epoch of "
                "this one, whose open window it did not leave alone. Run it in a callback's on_epoch_end, and list "
                "GradientAccumulation before that callback; or give it another model."
            )

    def _plan(self, steps: int) -> None:
        """Let the next window, or this one if it is still empty, have so many steps."""
        self._next_steps = steps
        if not self._in_window:
            self._steps = steps
        self._wrapped.window.plan(steps)

    def _close_window(self) -> None:
        self._in_window, self._steps = 0, self._next_steps
        self._sync()
        self._wrapped.flush()

    def _check_epoch(self) -> None:
        """Whether what was trained on is what was promised, and was told of."""
        window = self._wrapped.window
        if not (self._batches and window.built):
            return
        counts = window.read()
        if not (counts.by_rows or self._drops_micro_batches):
            raise WindowError(
                "The micro-batches of this epoch were not weighed by their rows: the model's `train_step` was replaced "
                "while it trained, or its inputs have no rows. Replace it before fit(), or train without the "
                "GradientAccumulation callback."
            )
        if not (self._drops_micro_batches or self._model.stop_training):
            # Where data end inside an execution of several steps, Keras counts all of them, or none.
            known = (self.params or {}).get("steps")
            doubt = 0 if known else getattr(self._model, "steps_per_execution", 1) - 1
            window.rule.check_epoch(counts, self._batches, doubt)

    def _discard(self) -> None:
        """Forget the window in which an earlier `fit` was interrupted, perhaps between a sum and its count."""
        optimizer = self._wrapped
        optimizer.window.in_fit = False
        if optimizer.micro_batches:
            logger.warning(
                "The last fit() was interrupted inside a window, whose %d micro-batches are discarded. Call "
                "optimizer.flush() before fit() to make the update of them.",
                optimizer.micro_batches,
            )
        if optimizer.built:
            optimizer.window.empty()

    def _discard_loaded(self) -> None:
        """Forget the open window that a callback has loaded (BackupAndRestore): Keras begins its epoch anew."""
        optimizer = self._wrapped
        if not optimizer.window.loaded:
            return
        optimizer.window.loaded = False
        self._sync()
        if optimizer.micro_batches:
            logger.warning(
                "An open window was loaded during this fit(), whose epoch begins anew: its %d micro-batches are "
                "discarded, as they come again.",
                optimizer.micro_batches,
            )
            optimizer.window.empty()
            self._in_window, self._steps = 0, self._next_steps

    def _sync(self) -> None:
        # On JAX the values of the variables are in the training loop until somebody asks for the model.
        _ = self.model

    @property
    def _wrapped(self) -> Optimizer:
        assert self._optimizer is not None, "Keras calls set_model first"
        return self._optimizer

    def _tell_of_short_epochs(self, steps: int) -> None:
        batches = (self.params or {}).get("steps")
        if batches and steps > batches and not self._told_of_short_epochs:
            self._told_of_short_epochs = True
            logger.warning(
                "A window of %d micro-batches is longer than an epoch of %d: one update per epoch, of %d micro-batches",
                steps,
                batches,
                batches,
            )

    def _tell_of_losses(self) -> None:
        """Name the compiled losses that are no means over rows."""
        losses = compiled_losses(self._model)
        for entry in [] if losses is None or self._wrapped.schedule.largest == 1 else loss_entries(losses):
            reduction = getattr(entry.loss, "reduction", "mean")
            if reduction not in ("mean", "sum_over_batch_size"):
                weighted = " where rows have sample or class weights" if reduction == "mean_with_sample_weight" else ""
                self._warn_once(
                    f"The loss {entry.loss.name!r} has reduction={reduction!r}, which is no mean over rows{weighted}: "
                    "the optimizer weighs micro-batches by rows, so updates are not the large batch's. Use "
                    'reduction="sum_over_batch_size", or gradaccum.keras.micro_batched in place of the wrapped '
                    "optimizer."
                )

    def _tell_of_other_optimizers(self) -> None:
        """Name the wrapped optimizers among the model's attributes that nobody drives."""
        names = []
        for name, value in vars(self._model).items():
            inside = value.values() if isinstance(value, dict) else value
            for one in inside if isinstance(value, list | tuple | dict) else [value]:
                known = isinstance(one, keras.optimizers.Optimizer) and wrapped_optimizer(one)
                if known and known is not self._wrapped and not name.startswith("_self_"):  # TensorFlow's own
                    names.append(f"model.{name}")
        if names:
            self._warn_once(
                "The GradientAccumulation callback drives the optimizer that the model was compiled with, and no "
                f"other. Not driven: {', '.join(dict.fromkeys(names))}. The micro-batches of each weigh the same, and "
                "its windows run on across epochs: give it micro-batches of one size, and call its flush() at each "
                "epoch's end, in the on_epoch_end of a callback of yours."
            )

    def _warn_once(self, message: str) -> None:
        told = self._wrapped.window.told
        if message not in told:
            told.add(message)
            logger.warning(message)
