"""A batch in micro-batches on TensorFlow: a `tf.while_loop` over its rows, be their number known or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree

from gradaccum.keras.loops.rows import Spec, has_rows

__all__ = ["Cut"]


class Cut:
    """A batch and how it is cut: `count` micro-batches of `size` rows, the first `larger` of them of one row more.

    As `gradaccum.core.sizes.even_sizes` cuts it; but while TensorFlow traces, the number of rows is mostly a tensor.
    """

    def __init__(self, data: Any, rows: int | None, micro_batch_size: int, static: bool) -> None:
        self.data = data
        self.rows = _checked_rows(data) if rows is None else rows
        self.count = (self.rows + micro_batch_size - 1) // micro_batch_size
        self.size, self.larger = self.rows // self.count, self.rows % self.count
        self.static = static
        """Whether all micro-batches of a loop must have one size, as XLA wants it."""

    def take(self, start: Any, size: Any) -> Any:
        """The micro-batch of these rows."""
        return tree.map_structure(lambda leaf: _slice(leaf, start, size) if has_rows(leaf) else leaf, self.data)

    def of(self, data: Any) -> Cut:
        """The same cut of other tensors with as many rows."""
        cut = copy.copy(self)
        cut.data = data
        return cut

    def start_of(self, index: Any) -> Any:
        """The first row of a micro-batch."""
        known = isinstance(index, int) and isinstance(self.larger, int)
        return index * self.size + (min(index, self.larger) if known else tf.minimum(index, self.larger))

    def ragged(self, index: Any) -> tuple[Any, Any]:
        """The first row of a micro-batch, and its size."""
        is_larger = index < self.larger
        return self.start_of(index), self.size + (
            int(is_larger) if isinstance(is_larger, bool) else tf.cast(is_larger, tf.int32)
        )

    @property
    def segments(self) -> list[tuple[Any, Any, Callable[[Any], tuple[Any, Any]]]]:
        """Loops over the micro-batches: `(first, behind the last, index -> (its first row, its size))`."""
        size, larger = self.size, self.larger

        def longer(index: Any) -> tuple[Any, Any]:
            # XLA compiles this loop even where no micro-batch is longer: its slices must exist.
            return index * (size + 1), tf.minimum(size + 1, self.rows)

        def shorter(index: Any) -> tuple[Any, Any]:
            return index * size + larger, size

        if isinstance(larger, int) and larger == 0:
            return [(0, self.count, shorter)]
        return [(0, larger, longer), (larger, self.count, shorter)] if self.static else [(0, self.count, self.ragged)]

    def loop(
        self, micro: Callable[[Any, Any, Any], tuple[Any, list[Any]]], carry: Any, kept: list[Spec], begin: int = 0
    ) -> tuple[Any, list[Any]]:
        """Run `micro(first row, size, carry) -> (carry, tensors)` over all micro-batches, from number `begin` on.

        Returns:
            The last carry, and the tensors of all micro-batches, one behind the other, of which `kept` tells the kinds.
        """
        rows: list[list[Any]] = []
        for first, stop, bounds in self.segments:
            if isinstance(stop, int):
                first = max(first, begin)
                if first >= stop:
                    continue
            elif begin:
                first, stop = tf.maximum(first, begin), tf.maximum(stop, begin)
            arrays = [
                tf.TensorArray(spec.dtype, stop - first, element_shape=[None, *(spec.row or ())], infer_shape=False)
                for spec in kept
            ]

            def body(index: Any, carry: Any, arrays: Any, first: Any = first, bounds: Any = bounds) -> Any:
                start, size = bounds(index)
                carry, tensors = micro(start, size, carry)
                written = [
                    array.write(index - first, tf.cast(tensor, array.dtype)) for array, tensor in zip(arrays, tensors)
                ]
                return index + 1, carry, written

            _, carry, arrays = tf.while_loop(
                lambda index, carry, arrays, stop=stop: index < stop,
                body,
                (tf.constant(0, tf.int32) + first, carry, arrays),
                parallel_iterations=1,  # more of them would be in memory at once
            )
            rows.append([array.concat() for array in arrays])
        return carry, [tf.concat(parts, 0) if len(parts) > 1 else parts[0] for parts in zip(*rows)]


def _checked_rows(data: Any) -> Any:
    """The rows, as a tensor that is an error where the arrays of the batch disagree. XLA finds that by itself."""
    rows = [tf.shape(leaf)[0] for leaf in tree.flatten(data) if has_rows(leaf)]
    message = (
        "A batch is cut into micro-batches along the first dimension: its arrays must have the same number of rows."
    )
    checks = [tf.debugging.assert_equal(rows[0], other, message) for other in rows[1:]]
    checks.append(tf.debugging.assert_positive(rows[0], "A batch must have at least one row."))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(rows[0])


def _slice(leaf: Any, start: Any, size: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        others = leaf.dense_shape[1:]
        return tf.sparse.slice(
            leaf,
            tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(others)], 0),
            tf.concat([[tf.cast(size, tf.int64)], others], 0),
        )
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start : start + size]
    others = tf.shape(leaf)[1:]
    part = tf.slice(leaf, tf.concat([[start], tf.zeros_like(others)], 0), tf.concat([[size], others], 0))
    part.set_shape([size if isinstance(size, int) else None, *leaf.shape[1:]])
    return part
