"""The two passes on TensorFlow: a `tf.custom_gradient` over `tf.while_loop`s, eager, traced, and compiled by XLA."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record  # whether a tape watches a tensor is nowhere else to be asked

from gradaccum.keras.chunking.body import Body, Result
from gradaccum.keras.loops import Spec
from gradaccum.keras.loops.loop_tensorflow import Cut
from gradaccum.keras.private import uncast_values

__all__ = ["two_passes"]


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The outputs of the whole batch."""
    return _Passes(body, micro_batch_size, keep).run()


class _Passes:
    def __init__(self, body: Body, micro_batch_size: int, keep: int) -> None:
        self.body = body
        for tensor in body.tensors:
            if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor)):
                raise TypeError(
                    f"The chunked {type(body.layer).__name__} {body.layer.name!r} takes dense tensors. Received: a "
                    f"{type(tensor).__name__} of shape {tuple(tensor.shape)}."
                )
        # Whether XLA will compile it isn't known here: its loops are over micro-batches of one size.
        self.cut = Cut(body.tensors, body.tensors[0].shape[0], micro_batch_size, static=True)
        # In a graph for any number of rows, XLA can't leave micro-batches out that aren't there: none is kept.
        self.keep = min(keep, self.cut.count) if isinstance(self.cut.count, int) else 0
        self._discover()
        body.state.read()
        self.weights = [v for v in body.read if v.trainable and tf.as_dtype(v.dtype).is_floating]
        self.frozen = [v for v in body.read if all(v is not weight for weight in self.weights)]

    def _discover(self) -> None:
        """What the layer reads and moves, and what its outputs are."""
        graph = tf.__internal__.FuncGraph("gradaccum_chunked")
        shapes: list[tuple[Any, ...]] = []
        with graph.as_default():
            self.body.run(self.cut.take(0, self.cut.size))
            size = self.cut.size if isinstance(self.cut.size, int) else 4
            with contextlib.suppress(Exception):  # a layer that is written for one size
                other = [tf.zeros((size + 1, *t.shape[1:]), t.dtype) for t in self.body.tensors]
                shapes = [tuple(output.shape) for output in self.body.run(other).outputs]
        self.body.check_rows(size + 1, shapes)
        self._check_outer(graph)
        drawn = {operation.type for operation in graph.get_operations() if operation.type in _STATEFUL}
        if drawn:
            raise ValueError(
                f"The chunked {type(self.body.layer).__name__} {self.body.layer.name!r} draws random numbers with "
                f"TensorFlow's own generator ({', '.join(sorted(drawn))}), which the second pass can't draw again. Use "
                "keras.random with a keras.random.SeedGenerator."
            )

    def _check_outer(self, graph: Any) -> None:
        """Refuse what a gradient should go to, of which `tf.custom_gradient` knows nothing."""
        body = self.body
        own = [*body.tensors, *body.shared, *uncast_values([*body.read, *body.state.variables])]
        known = {id(tensor) for tensor in own}
        outer = [tensor for tensor, _ in graph.captures if tensor.dtype.is_floating and id(tensor) not in known]
        body.refuse_outer([tuple(tensor.shape) for tensor in outer if record.should_record_backprop([tensor])])

    def run(self) -> list[Any]:
        """The outputs of the whole batch."""
        body, state = self.body, self.body.state
        self.frozen_values = [tf.convert_to_tensor(value) for value in uncast_values(self.frozen)]
        weights = [tf.convert_to_tensor(value) for value in [*uncast_values(self.weights), *body.shared]]
        carry = [tf.convert_to_tensor(value) for value in state.start()]
        counts = len(weights), len(weights) + len(body.tensors)
        parts = []
        for index in range(self.keep):
            start, size = self.cut.ragged(index)
            result = self._evaluated(weights, carry, self.cut.take(start, size))
            parts.append(result.outputs)
            carry = self._after(carry, result, size)

        @tf.custom_gradient
        def passes(*tensors: Any) -> Any:
            weights, rows, start = tensors[: counts[0]], tensors[counts[0] : counts[1]], tensors[counts[1] :]
            cut = self.cut.of(list(rows))

            def micro(first: Any, size: Any, carry: Any) -> Any:
                result = self._evaluated(weights, carry, cut.take(first, size))
                return self._after(carry, result, size), result.outputs

            carry, outputs = cut.loop(micro, list(start), body.specs, self.keep)

            def gradient(*upstream: Any) -> Any:
                return self._gradients(weights, rows, start, upstream[: len(outputs)])

            return (*outputs, *carry), gradient

        if not isinstance(self.cut.count, int) or self.keep < self.cut.count:
            results = passes(*weights, *body.tensors, *carry)
            parts.append(list(results[: len(body.specs)]))
            carry = results[len(body.specs) :]
        state.finish([tf.stop_gradient(value) for value in carry])
        return [tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts)]

    def _evaluated(self, weights: Any, carry: Any, tensors: Any) -> Result:
        state = self.body.state
        values = [
            *zip(self.weights, weights),
            *zip(self.frozen, self.frozen_values),
            *zip(state.variables, state.values(list(carry))),
        ]
        return self.body.run(tensors, values, weights[len(self.weights) :])

    def _after(self, carry: Any, result: Result, size: Any) -> list[Any]:
        after = self.body.state.after(list(carry), result.values, result.valid, size, self.cut.rows)
        return [tf.cast(value, before.dtype) for value, before in zip(after, carry)]

    def _gradients(self, weights: Any, rows: Any, start: Any, upstream: Any) -> list[Any]:
        """Of the weights, of what has rows, and none of the state."""
        used = [n for n, spec in enumerate(self.body.specs) if tf.as_dtype(spec.dtype).is_floating]
        own = [n for n, tensor in enumerate(rows) if tensor.dtype.is_floating]
        behind = self.cut.start_of(self.keep)
        cut = self.cut.of(list(rows))
        whole = self.cut.of([_behind(behind, upstream[n]) if self.keep else upstream[n] for n in used])

        def micro(first: Any, size: Any, carry: Any) -> Any:
            carry, sums = carry
            tensors = cut.take(first, size)
            given = whole.take(first, size)
            watched = [tf.identity(weight) for weight in weights]
            with tf.GradientTape() as tape:
                tape.watch([*watched, *(tensors[n] for n in own)])
                result = self._evaluated(watched, carry, tensors)
                outputs = [result.outputs[n] for n in used]
            found = tape.gradient(outputs, [*watched, *(tensors[n] for n in own)], given)
            sums = [_added(total, gradient) for total, gradient in zip(sums, found)]
            some = [
                tf.zeros_like(tensors[n]) if gradient is None else tf.convert_to_tensor(gradient)
                for n, gradient in zip(own, found[len(watched) :])
            ]
            return (self._after(carry, result, size), sums), some

        zeros = [tf.zeros_like(weight, _wide(weight.dtype)) for weight in weights]
        specs = [Spec.of(rows[n]) for n in own]
        (_, sums), some = cut.loop(micro, (list(start), zeros), specs, self.keep)
        gradients: list[Any] = [tf.cast(total, weight.dtype) for total, weight in zip(sums, weights)]
        gradients += [None] * (len(rows) + len(start))
        for n, gradient in zip(own, some):
            gradients[len(weights) + n] = _behind(behind, gradient) if self.keep else gradient
        return gradients


_STATEFUL = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


def _behind(rows: Any, tensor: Any) -> Any:
    """A tensor behind so many rows of zeros."""
    return tf.concat([tf.zeros(tf.concat([[rows], tf.shape(tensor)[1:]], 0), tensor.dtype), tensor], 0)


def _added(total: Any, gradient: Any) -> Any:
    if gradient is None:
        return total
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, None], tf.cast(gradient.values, total.dtype))
    return total + tf.cast(gradient, total.dtype)


def _wide(dtype: Any) -> Any:
    """Half precision in float32: sums of many lose what they add otherwise."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
