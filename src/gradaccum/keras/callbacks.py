"""A callback that passes on what only `fit` knows: epochs, and the rows of micro-batches."""

from __future__ import annotations

import logging
from typing import Any

import keras
from keras import ops

from gradaccum.errors import WindowError
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import PARTS, leaves_with_rows, listing
from gradaccum.keras.batch_norm import batch_norms_of
from gradaccum.keras.optimizer import wrapped_optimizer
from gradaccum.schedule import Schedule, Steps

__all__ = ["GradientAccumulation"]

logger = logging.getLogger("gradaccum")

_ACROSS_ROWS = tuple(getattr(keras.losses, name, None) for name in ("circle", "dice", "tversky"))


class GradientAccumulation(keras.callbacks.Callback):
    """Closes the window at each epoch's end, weighs micro-batches by their rows, and applies a schedule.

    Every window is divided by the rows that it holds, also a short last one with a ragged micro-batch. If `fit` knows
    the number of batches, the epoch's last window closes with its last batch, before validation and before any
    callback's `on_epoch_end`. Otherwise (a generator, or `stop_training`) it closes in this callback's `on_epoch_end`:
    list it before callbacks that save or read the model there.

    Args:
        steps: Micro-batches in a window, in place of the optimizer's own: an int, `{epoch: steps}`, or a callable
            `(epoch, update) -> steps`, called when a window opens, where `update` counts from the start of training.
            None keeps the optimizer's. A new length doesn't recompile. A callable costs one number read from the device
            per micro-batch.

    Raises:
        TypeError, ValueError: `steps` is invalid, or the model's optimizer is not one of `gradaccum.keras.optimizers`.

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
        self._optimizer: Any = None
        self._in_epoch = self._drops_micro_batches = self._losses_named = False
        self._epoch = self._batches = 0  # this one, and how many of its batches are done
        self._in_window = 0  # micro-batches of this window, dropped ones too
        self._steps = self._next_steps = 1  # of this window, and of the next one
        self._seen = 0  # micro-batches of all epochs
        self._weights: Any = None  # updates, and sums of the weights, when the latest micro-batch that is watched began

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

    @property
    def _followed(self) -> Schedule:
        return self._schedule or self._optimizer.schedule

    @property
    def _batches_of_epoch(self) -> int | None:
        """Where `fit` knows it."""
        return (self.params or {}).get("steps")

    @property
    def _per_execution(self) -> int:
        return getattr(self._model, "steps_per_execution", 1)

    def on_train_begin(self, logs: Any = None) -> None:
        window, per_execution = self._optimizer.window, self._per_execution
        if self._followed.largest is None and per_execution > 1:
            raise ValueError(
                "A callable schedule is called between micro-batches, so it needs steps_per_execution=1. Received: "
                f"steps_per_execution={per_execution}. Use {{epoch: steps}}, or compile(steps_per_execution=1)."
            )
        other, window.driver = window.driver, self
        if other is not None and other is not self and other.params is self.params:  # of the same fit()
            raise ValueError(
                "fit() was given two GradientAccumulation callbacks for one optimizer, which would both close its "
                f"windows. Received: a second one, with steps={self._schedule}. Keep one of them."
            )
        # What compile() puts around it under mixed_float16 drops micro-batches that overflow, and calls nobody.
        self._drops_micro_batches = self._model.optimizer is not self._optimizer
        if self._drops_micro_batches and per_execution > 1:
            logger.warning(
                "With a LossScaleOptimizer around the optimizer and steps_per_execution=%d, a micro-batch that "
                "overflows makes the following windows of its epoch begin later. Compile with steps_per_execution=1.",
                per_execution,
            )
        window.name_batch_norms([layer.name for layer in batch_norms_of(self._model)])
        if window.in_fit:  # perhaps interrupted between a sum and its count
            window.in_fit = False
            self._discard(
                "The last fit() was interrupted inside a window, whose %d micro-batches are discarded. To update with "
                "them, call optimizer.flush() before fit()."
            )
        self._in_window = self._optimizer.micro_batches
        if self._in_window and not window.read().unit:
            logger.warning(
                "The open window holds %d micro-batches whose rows are not known. Each counts as if it had the next "
                "one's rows; if not, the update is not the large batch's. To close the window first, call "
                "optimizer.flush() before fit().",
                self._in_window,
            )
        self._steps = self._next_steps = self._optimizer.steps
        self._name_losses()
        self._name_other_optimizers()
        self._drive()

    def on_train_end(self, logs: Any = None) -> None:
        schedule, window = self._optimizer.schedule, self._optimizer.window
        window.driven = window.in_fit = False
        self._stop_counting()
        if self._schedule is not None and schedule.constant is not None:
            window.plan(schedule.constant)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        window, batches = self._optimizer.window, self._batches_of_epoch
        if not window.driven:  # a `fit` in a callback's on_epoch_end has ended since
            self._drive()
        if window.loaded:  # by a callback, BackupAndRestore: Keras begins its epoch anew
            window.loaded = False
            self._sync()
            if self._discard(
                "An open window was loaded during this fit(), whose epoch starts again: the window's %d micro-batches "
                "are discarded, because they come again."
            ):
                self._in_window, self._steps = 0, self._next_steps
        self._epoch, self._in_epoch, self._batches = epoch, True, 0
        if batches:
            window.rule.check_batches(batches)
        window.begin_epoch()
        if self._followed.largest is not None and not window.rule.fixed:
            steps = self._followed(epoch)
            self._plan(steps)
            if batches and steps > batches:
                window.warn_once(
                    f"A window of {steps} micro-batches is longer than an epoch of {batches}: one update per epoch, of "
                    f"{batches} micro-batches"
                )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._check_driven()
        self._optimizer.window.in_fit = True
        if self._followed.largest is None:
            self._sync()
            if not self._optimizer.micro_batches:
                self._plan(self._followed(self._epoch, int(self._optimizer.iterations)))
        windows, self._seen = self._seen // self._steps, self._seen + self._per_execution
        if windows & (windows + 1) == 0 and self._optimizer.built:  # in windows 1, 2, 4, 8, ...
            self._watch()

    def _watch(self) -> None:
        """Name weights that have changed since the micro-batch before, in the same window, and others that move."""
        self._sync()
        optimizer, previous = self._optimizer, self._weights
        statistics = {id(variable) for layer in batch_norms_of(self._model) for variable in layer.weights}
        others = [variable for variable in self._model.non_trainable_weights if id(variable) not in statistics]
        variables = [*optimizer.window.variables, *others]
        with backends.running().unrecorded():
            sums = [ops.sum(ops.cast(variable.value, "float32")) for variable in variables]
            updates = int(ops.convert_to_numpy(optimizer.iterations))
            self._weights = updates, ops.convert_to_numpy(ops.stack(sums)).tolist()
        if previous is None or previous[0] != self._weights[0] or not optimizer.micro_batches:
            return
        triples = zip(variables, previous[1], self._weights[1])
        different = [variable.path for variable, old, new in triples if old != new and new == new]
        trained = {variable.path for variable in optimizer.window.variables}
        changed, moved = ([path for path in different if (path in trained) == is_weight] for is_weight in (True, False))
        if moved:
            optimizer.window.warn_once(
                "Variables move in the forward pass, so once per micro-batch and not once per update: "
                f"{', '.join(map(repr, moved[:4]))}. If the loss depends on them, updates are not the large batch's. "
                "Move them in a callback if `optimizer.updated`, or use gradaccum.keras.micro_batched, which compares."
            )
        if changed:
            optimizer.window.warn_once(
                "Weights were changed inside an open window, by set_weights() or another optimizer, perhaps: "
                f"{', '.join(map(repr, changed[:4]))}. Its other micro-batches have seen others, so the update is not "
                "the large batch's. Change weights where `optimizer.updated` is True, or after flush()."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        batches = self._batches_of_epoch
        done = min(batch + 1, batches or batch + 1)  # with steps_per_execution, Keras counts beyond the epoch's end
        self._in_window += done - self._batches
        self._batches = done
        if not self._losses_named:  # TensorFlow makes them in a built model's first batch
            self._name_losses()
            self._losses_named = True
        if done == batches:
            self._end_epoch()
        elif self._drops_micro_batches and self._in_window >= self._steps:
            self._in_window %= self._steps  # several steps per execution may have begun the next one
            if not self._in_window:
                # Close it, if it is still open: the next one begins where it would have without the dropped ones.
                self._close_window()

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        """Close the epoch's last window, and check that the epoch was what it was to be."""
        if self._in_epoch:
            self._in_epoch = False
            self._check_driven()
            self._close_window()
            window = self._optimizer.window
            if not (self._batches and window.built) or self._drops_micro_batches:
                return
            counts = hasattr(vars(self._model).get("train_step"), "own")
            if not counts or self._model.train_function is not window.counting_function:
                raise WindowError(
                    "The micro-batches of this epoch were not weighed by their rows: the model's `train_step` was "
                    "replaced while it trained. Replace it before fit(), or train without the GradientAccumulation "
                    "callback."
                )
            if not self._model.stop_training:
                # Where data end inside an execution of several steps, Keras counts all of them, or none.
                doubt = 0 if self._batches_of_epoch else self._per_execution - 1
                window.rule.check_epoch(window.read(), self._batches, doubt)

    def _drive(self) -> None:
        """Pass on rows from now on, counted in the step's own graph, so that nothing waits for a device.

        The model's compiled training function is made anew once, and kept for the next `fit`.
        """
        model, window = self._model, self._optimizer.window
        window.driven = True
        self._stop_counting()  # a `fit` that ended with an error has left it there, or this one runs inside of another
        train_step, own = model.train_step, vars(model).get("train_step")

        def counting_train_step(*args: Any, **kwargs: Any) -> Any:
            data = kwargs["data"] if "data" in kwargs else args[-1]  # JAX passes its state first
            with window.with_rows(backends.running().replica(), _rows_of(data)):
                return train_step(*args, **kwargs)

        counting_train_step.own = own  # type: ignore[attr-defined]
        model.train_step = counting_train_step
        if window.counting_function is None or model.train_function is not window.counting_function:
            model.make_train_function(force=True)
            window.counting_function = model.train_function

    def _stop_counting(self) -> None:
        """Give the model its own step back."""
        step: Any = vars(self._model).get("train_step")
        if hasattr(step, "own"):
            del self._model.train_step
            if step.own is not None:  # a user's own step, set on the instance
                self._model.train_step = step.own

    def _check_driven(self) -> None:
        """Whether no other `fit` has ended since the epoch began, and the window with it."""
        if not self._optimizer.window.driven:
            raise WindowError(
                "Another fit() of this model, with its own GradientAccumulation callback, ran inside an epoch of this "
                "one and changed its open window. Run it in the on_epoch_end of a callback that is listed after "
                "GradientAccumulation, or with another model."
            )

    def _plan(self, steps: int) -> None:
        """Let the next window, or this one if it is still empty, have so many steps."""
        self._next_steps = steps
        if not self._in_window:
            self._steps = steps
        self._optimizer.window.plan(steps)

    def _close_window(self) -> None:
        self._in_window, self._steps = 0, self._next_steps
        self._sync()
        self._optimizer.flush()

    def _discard(self, message: str) -> bool:
        """Forget the open window, with a warning that says so where it holds any micro-batches. Returns whether."""
        optimizer, held = self._optimizer, self._optimizer.micro_batches
        if held:
            logger.warning(message, held)
        if optimizer.built:
            optimizer.window.empty()
        return held > 0

    def _sync(self) -> None:
        # On JAX the values of the variables are in the training loop until somebody asks for the model.
        _ = self.model

    def _name_losses(self) -> None:
        """Name the compiled losses that are no means over rows."""
        losses = private.loss_entries(private.compiled_losses(self._model))
        self._losses_named = bool(losses)
        for entry in losses if self._optimizer.schedule.largest != 1 else ():
            function = getattr(entry.loss, "fn", None)
            if function and function in _ACROSS_ROWS and getattr(entry.loss, "axis", None) is None:
                self._optimizer.window.warn_once(
                    f"The loss {entry.loss.name!r} looks across the rows of a batch: a window's mean gradient is not "
                    "the large batch's. Use gradaccum.keras.chunked in place of the wrapped optimizer, or for Dice and "
                    "Tversky an `axis` without the rows."
                )
            if getattr(entry.loss, "ignore_class", None) is not None:
                self._optimizer.window.warn_once(
                    f"The loss {entry.loss.name!r} has ignore_class={entry.loss.ignore_class}, so it is a mean over "
                    "the other labels: the optimizer weighs micro-batches by rows, so updates are not exact if "
                    "micro-batches hold different numbers of them. Use gradaccum.keras.micro_batched."
                )
            reduction = getattr(entry.loss, "reduction", "mean")
            if reduction not in ("mean", "sum_over_batch_size"):
                weighted = " where rows have sample or class weights" if reduction == "mean_with_sample_weight" else ""
                self._optimizer.window.warn_once(
                    f"The loss {entry.loss.name!r} has reduction={reduction!r}, which is no mean over rows{weighted}: "
                    "the optimizer weighs micro-batches by rows, so updates are not the large batch's. Use "
                    'reduction="sum_over_batch_size", or gradaccum.keras.micro_batched in place of the wrapped '
                    "optimizer."
                )

    def _name_other_optimizers(self) -> None:
        """Name the wrapped optimizers among the model's attributes that nobody drives."""
        found: dict[str, Any] = {}
        for name, value in vars(self._model).items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            wrapped = [wrapped_optimizer(one) for one in values if isinstance(one, keras.optimizers.Optimizer)]
            if any(one not in (None, self._optimizer) for one in wrapped) and not name.startswith(
                "_self_"
            ):  # TensorFlow's
                found[f"model.{name}"] = value
        if found:
            self._optimizer.window.warn_once(
                "The GradientAccumulation callback drives only the optimizer that the model was compiled with. Not "
                f"driven: {', '.join(found)}. In these, micro-batches weigh the same and windows run on across epochs: "
                "use micro-batches of one size, and call their flush() in the on_epoch_end of your own callback."
            )


def _rows_of(data: Any) -> Any:
    """The rows of what `fit` gives a training step: an int, or a scalar tensor where only the run will tell.

    They are those of the targets and weights, which have a row each: an input may be shared by all rows. Without
    targets, all inputs must agree.
    """
    leaves = leaves_with_rows(data, PARTS[1:]) or leaves_with_rows(data)
    if not leaves:
        raise WindowError(
            "Micro-batches can't be weighed by their rows: no array of theirs has a dimension. Train without the "
            "GradientAccumulation callback."
        )
    known = {leaf.shape[0] for _, leaf in leaves}
    if len(known - {None}) > 1:
        raise ValueError(
            "A micro-batch's rows are counted in its targets and sample weights or, without these, in all its inputs: "
            f"the counts must be equal. Received:{listing(leaves)}\nTargets need one entry per row; with targets, pass "
            "what all rows share as an input."
        )
    if None not in known:
        return known.pop()
    return backends.running().checked_rows(leaves)
