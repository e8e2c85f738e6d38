"""The two passes of a chunked layer: outputs without activations, then each micro-batch again for its gradients."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from gradaccum.keras import backends
from gradaccum.keras.backends.rows import Result, Spec
from gradaccum.keras.chunking.body import Body

__all__ = ["two_passes"]


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The tensors in the outputs of the whole batch, and their masks."""
    return backends.running().plainly(lambda: _Passes(body, micro_batch_size, keep).run())


class _Passes:
    def __init__(self, body: Body, micro_batch_size: int, keep: int) -> None:
        self.body, self.backend = body, backends.running()
        self.batches = self.backend.chunks(body.tensors, micro_batch_size)
        # In a graph for any number of rows, micro-batches can't be left out that aren't there: none is kept.
        self.keep = min(keep, self.batches.count) if isinstance(self.batches.count, int) else 0
        self.program = self.backend.Program(body, self.batches)

    def run(self) -> list[Any]:
        """The outputs of the whole batch."""
        batches, carry, kept = self.batches, self.program.start(), []
        for index in range(self.keep):
            tensors, size = batches.at(index)
            result = self.program.evaluate(None, carry, tensors)
            carry = self._after(carry, result, size)
            kept.append([batches.part(output) for output in result.outputs])
        if not isinstance(batches.count, int) or self.keep < batches.count:
            carry = None if carry is None else [ops.stop_gradient(value) for value in carry]
            outputs, carry = self.backend.recomputed(self, carry)
            kept.append(outputs)
        self.body.state.finish([ops.stop_gradient(value) for value in carry])
        return [batches.joined(parts) for parts in zip(*kept)]

    def _after(self, carry: Any, result: Result, size: Any) -> list[Any]:
        state = self.body.state
        with self.backend.unrecorded():
            carry = state.start() if carry is None else list(carry)
            after = state.after(carry, result.values, result.valid, size, self.batches.rows)
            return [ops.cast(value, before.dtype) for value, before in zip(after, carry)]

    def first(self, weights: Any, tensors: Any, carry: Any) -> tuple[list[Any], list[Any]]:
        """The outputs of the micro-batches that aren't kept, and the carry behind them."""

        def micro(tensors: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
            result = self.program.evaluate(weights, carry, tensors)
            return self._after(carry, result, size), result.outputs

        specs = getattr(self.body, "specs", ())
        carry, outputs = self.batches.of(list(tensors)).run(micro, carry, specs, begin=self.keep)
        return outputs, carry

    def second(self, weights: Any, tensors: Any, start: Any, upstream: list[Any], wanted: Any = None) -> list[Any]:
        """The gradients of weights and tensors with rows."""
        backend, batches, count = self.backend, self.batches, len(weights)
        wanted = [n for n, one in enumerate([*weights, *tensors]) if _is_float(one)] if wanted is None else wanted
        shared, own = [n for n in wanted if n < count], [n - count for n in wanted if n >= count]
        used = [n for n, given in enumerate(upstream) if given is not None]

        def micro(micro_batch: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
            (carry, sums), (tensors, given) = carry, micro_batch

            def outputs(inputs: list[Any]) -> Any:
                some, rows = list(weights), list(tensors)
                for n, value in zip(shared, inputs):
                    some[n] = value
                for n, value in zip(own, inputs[len(shared) :]):
                    rows[n] = value
                result = self.program.evaluate(some, carry, rows)
                return [result.outputs[n] for n in used], result

            inputs = [*(weights[n] for n in shared), *(tensors[n] for n in own)]
            found, result = backend.pullback(outputs, inputs, given, self.program)
            sums = [backend.added(*pair) for pair in zip(sums, found)]
            rows = [backend.dense(gradient, tensors[n]) for n, gradient in zip(own, found[len(shared) :])]
            return (self._after(carry, result, size), sums), rows

        whole = batches.of((list(tensors), [batches.joined([upstream[n]], self.keep) for n in used]))
        zeros = [backend.no_gradient_yet(weights[n]) for n in shared]
        specs = [Spec.of(tensors[n]) for n in own]
        (_, sums), rows = whole.run(micro, (start, zeros), specs, begin=self.keep)
        gradients: list[Any] = [None] * (count + len(tensors))
        for n, total in zip(shared, sums):
            gradients[n] = None if total is None else ops.cast(total, weights[n].dtype)
        for n, part in zip(own, rows):
            gradients[count + n] = batches.joined([part], self.keep)
        return gradients


def _is_float(tensor: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
