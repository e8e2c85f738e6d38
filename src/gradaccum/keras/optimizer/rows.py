"""How many rows a micro-batch has: an optimizer sees gradients only, so the training step tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from gradaccum.keras.optimizer.accumulation import accumulation
from gradaccum.keras.optimizer.window import Window

__all__ = ["RowWatch"]


class RowWatch:
    """Tells the window of a model's optimizer the rows of each micro-batch, from `start` to `stop`.

    Rows are counted in the step's own graph, so nothing waits for a device. The model's compiled training function is
    made anew once, and kept for the next `fit`.

    Args:
        model: A compiled model.
        window: That of the `Optimizer` in what it was compiled with.
    """

    def __init__(self, model: Any, window: Window) -> None:
        self._model = model
        self._window = window
        self._step_of_instance: Any = None  # a user's own step, set on the instance

    def start(self) -> None:
        """Put the counting step in the place of the model's."""
        model, window = self._model, self._window
        self.stop()  # a `fit` that ended with an error has left it there
        self._step_of_instance = vars(model).get("train_step")
        model.train_step = _counting(model.train_step, window)
        if window.counting_function is None or model.train_function is not window.counting_function:
            model.make_train_function(force=True)
            window.counting_function = model.train_function

    def stop(self) -> None:
        """Give the model its own step back."""
        if not hasattr(vars(self._model).get("train_step"), "counts_rows"):
            return
        del self._model.train_step
        if self._step_of_instance is not None:
            self._model.train_step = self._step_of_instance


def _counting(train_step: Callable[..., Any], window: Window) -> Callable[..., Any]:
    def counting_train_step(*args: Any, **kwargs: Any) -> Any:
        # JAX passes its state first. The data is last everywhere.
        data = kwargs["data"] if "data" in kwargs else args[-1]
        with window.with_rows(accumulation.replica(), _rows_of(data)):
            return train_step(*args, **kwargs)

    counting_train_step.counts_rows = True  # type: ignore[attr-defined]  # a mark for stop()
    return counting_train_step


def _rows_of(data: Any) -> Any:
    """The rows of what `fit` gives a training step: an int, or a scalar tensor where only the run will tell."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    leaf = next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)
    if leaf is None:
        return None
    rows = leaf.shape[0] if len(leaf.shape) else None
    if rows is None and keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.shape(leaf)[0]
    return rows
