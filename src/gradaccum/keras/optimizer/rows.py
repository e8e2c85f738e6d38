"""How many rows a micro-batch has: an optimizer sees gradients only, so the training step tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from gradaccum.keras import backends
from gradaccum.keras.backends.rows import PARTS, leaves_with_rows, listing
from gradaccum.keras.optimizer.window import Window

__all__ = ["RowWatch"]


class RowWatch:
    """Tells the window of a model's optimizer the rows of each micro-batch, from `start` to `stop`.

    Rows are counted in the step's own graph, so nothing waits for a device. The model's compiled training function is
    made anew once, and kept for the next `fit`.
    """

    def __init__(self, model: Any, window: Window) -> None:
        self._model = model
        self._window = window

    def start(self) -> None:
        """Put the counting step in the place of the model's."""
        model, window = self._model, self._window
        self.stop()  # a `fit` that ended with an error has left it there, or this one runs inside of another
        own = vars(model).get("train_step")
        model.train_step = _counting(model.train_step, window)
        model.train_step.own = own
        if window.counting_function is None or model.train_function is not window.counting_function:
            model.make_train_function(force=True)
            window.counting_function = model.train_function

    def stop(self) -> None:
        """Give the model its own step back."""
        step = vars(self._model).get("train_step")
        if not hasattr(step, "own"):
            return
        del self._model.train_step
        if step.own is not None:  # a user's own step, set on the instance
            self._model.train_step = step.own


def _counting(train_step: Callable[..., Any], window: Window) -> Callable[..., Any]:
    def counting_train_step(*args: Any, **kwargs: Any) -> Any:
        # JAX passes its state first. The data is last everywhere.
        data = kwargs["data"] if "data" in kwargs else args[-1]
        with window.with_rows(backends.running().replica(), _rows_of(data)):
            return train_step(*args, **kwargs)

    return counting_train_step


def _rows_of(data: Any) -> Any:
    """The rows of what `fit` gives a training step: an int, or a scalar tensor where only the run will tell.

    They are those of the targets and weights, which have a row each: an input may be shared by all rows. Without
    targets, all inputs must agree. None where nothing has rows.
    """
    leaves = leaves_with_rows(data, PARTS[1:]) or leaves_with_rows(data)
    if not leaves:
        return None
    known = {leaf.shape[0] for _, leaf in leaves}
    if len(known - {None}) > 1:
        raise ValueError(
            "The rows of a micro-batch are those of its targets and sample weights or, where there are none, of all "
            f"its inputs: they must be the same number. Received:{listing(leaves)}\nGive targets a row each; what all "
            "rows share belongs to the inputs, beside targets."
        )
    if None not in known:
        return known.pop()
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    first, *others = [tf.shape(leaf)[0] for _, leaf in leaves]
    if not others:
        return first
    alike = tf.reduce_all([first == other for other in others])
    paths = ", ".join(path for path, _ in leaves)
    name = "rows_of_a_micro_batch_must_be_the_same_number"
    message = f"The arrays of a micro-batch must have the same number of rows: {paths}. Received:"
    with tf.control_dependencies([tf.debugging.Assert(alike, [message, first, *others])]):
        for other in others:
            # XLA leaves assertions out. It knows the shapes when it compiles, and takes no reshape to another size.
            first = tf.reshape(tf.fill([other], first), [first], name=name)[0]
        return tf.identity(first)
