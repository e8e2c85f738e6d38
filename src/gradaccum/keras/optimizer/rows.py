"""How many rows a micro-batch has: an optimizer sees gradients only, so the training step tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from gradaccum.keras.loops import has_rows
from gradaccum.keras.optimizer.accumulation import accumulation
from gradaccum.keras.optimizer.window import Window

__all__ = ["RowWatch", "leaves_with_rows", "listing"]

PARTS = ("x", "y", "sample_weight")
"""Of what `fit` gives a training step."""


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
        with window.with_rows(accumulation.replica(), _rows_of(data)):
            return train_step(*args, **kwargs)

    return counting_train_step


def leaves_with_rows(data: Any, parts: Sequence[str] = PARTS) -> list[tuple[str, Any]]:
    """The arrays in what `fit` gives a training step, each with its path in the words of an error.

    Args:
        data: `x`, `(x, y)` or `(x, y, sample_weight)`, in any structures. Scalars and None have no rows.
        parts: Which of the three to look at.
    """
    found = []
    for name, part in zip(PARTS, keras.utils.unpack_x_y_sample_weight(data)):
        for path, leaf in keras.tree.flatten_with_path(part) if name in parts else ():
            if has_rows(leaf):
                found.append((name + "".join(f"[{key!r}]" for key in path), leaf))
    return found


def listing(leaves: Sequence[tuple[str, Any]]) -> str:
    """These paths with their shapes, a line each, for an error."""
    return "".join(f"\n  {path}  shape {tuple(leaf.shape)}" for path, leaf in leaves)


def _rows_of(data: Any) -> Any:
    """The rows of what `fit` gives a training step: an int, or a scalar tensor where only the run will tell.

    They are those of the targets and weights, which have a row each: an input may be shared by all rows. Without
    targets, all inputs must agree. None where nothing has rows.

    Raises:
        ValueError: They don't agree.
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
