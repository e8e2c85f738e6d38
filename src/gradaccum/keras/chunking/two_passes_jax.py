"""The two passes on JAX: a `custom_vjp` over loops of the layer's own program, traced once for each size."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from gradaccum.core.sizes import even_sizes
from gradaccum.keras.chunking.body import Body, Result
from gradaccum.keras.loops.loop_jax import by_device, devices_of, like, loop, stacks

__all__ = ["two_passes"]


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The outputs of the whole batch."""
    return _Passes(body, micro_batch_size, keep).run()


class _Traced(NamedTuple):
    """The layer on micro-batches of one size: its program, what that closes over by its place, and its results."""

    jaxpr: Any
    consts: list[int]
    results: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which inputs need a gradient, by position: known when the first pass is traced, and needed in the second."""

    positions: tuple[int, ...]


class _Passes:
    """Inputs are flat: what the layer closes over, as its weights, and the tensors that have rows."""

    def __init__(self, body: Body, micro_batch_size: int, keep: int) -> None:
        self.body = body
        self.rows = body.tensors[0].shape[0]
        self.devices = devices_of(self.rows)
        sizes = even_sizes(self.rows // self.devices, micro_batch_size)
        self.kept, self.rest = sizes[:keep], sizes[keep:]
        self._discover(self.devices * sizes[0])
        body.state.read()
        self.consts: list[Any] = []
        self.traced = {size: self._trace(size) for size in sorted({self.devices * size for size in sizes})}

    def _shapes(self, size: int) -> list[Any]:
        return [jax.ShapeDtypeStruct((size, *tensor.shape[1:]), tensor.dtype) for tensor in self.body.tensors]

    def _discover(self, size: int) -> None:
        """What the layer moves, and that its outputs have rows, at two sizes."""
        shapes: list[Any] = []

        def outputs(tensors: list[Any]) -> None:
            shapes.append([tensor.shape for tensor in self.body.run(tensors).outputs])

        jax.eval_shape(outputs, self._shapes(size))
        other = size - 1 if size > 1 else 2
        with contextlib.suppress(Exception):  # a layer that is written for one size
            jax.eval_shape(outputs, self._shapes(other))
            size = other
        self.body.check_rows(size, shapes[-1])

    def _trace(self, size: int) -> _Traced:
        state = self.body.state

        def micro_batch(values: list[Any], tensors: list[Any]) -> Any:
            return tuple(self.body.run(tensors, zip(state.variables, values)))

        values = state.values(state.start())
        closed, shapes = jax.make_jaxpr(micro_batch, return_shape=True)(values, self._shapes(size))
        return _Traced(closed.jaxpr, [self._place(const) for const in closed.consts], jax.tree.structure(shapes))

    def _place(self, const: Any) -> int:
        for place, known in enumerate(self.consts):
            if known is const:
                return place
        self.consts.append(const)
        return len(self.consts) - 1

    def run(self) -> list[Any]:
        """The outputs of the whole batch."""
        state = self.body.state
        inputs, carry = [*self.consts, *self.body.tensors], state.start()
        parts = []
        if self.kept:
            outputs, carry = self._forward(inputs, carry, self.kept, 0)
            carry = jax.lax.stop_gradient(carry)
            parts.append(outputs)
        if self.rest:
            run = jax.custom_vjp(self._outputs)
            run.defvjp(self._first_pass, self._second_pass, symbolic_zeros=True)
            outputs, carry = run(inputs, carry)
            parts.append(outputs)
        state.finish(jax.lax.stop_gradient(carry))
        return [jnp.concatenate(pieces, 1).reshape(-1, *pieces[0].shape[2:]) for pieces in zip(*parts)]

    def _outputs(self, inputs: list[Any], carry: list[Any]) -> Any:
        return self._forward(inputs, carry, self.rest, sum(self.kept))

    def _forward(self, inputs: list[Any], carry: list[Any], sizes: list[int], start: int) -> Any:
        """The outputs of these micro-batches, by device, and the carry after them."""
        count = len(self.consts)
        parts = []
        for size, stacked in stacks(inputs[count:], sizes, self.devices, start):

            def micro(carry: Any, tensors: Any, size: int = size) -> Any:
                result = self._evaluated(size, inputs[:count], carry, tensors)
                return self._after(carry, result, size), result.outputs

            carry, outputs = loop(micro, carry, stacked)
            parts.append([by_device(output, self.devices) for output in outputs])
        return [jnp.concatenate(pieces, 1) for pieces in zip(*parts)], carry

    def _evaluated(self, size: int, consts: list[Any], carry: list[Any], tensors: list[Any]) -> Result:
        traced = self.traced[size]
        given = [consts[place] for place in traced.consts]
        flat = jax.core.eval_jaxpr(traced.jaxpr, given, *self.body.state.values(carry), *tensors)
        return Result(*jax.tree.unflatten(traced.results, flat))

    def _after(self, carry: list[Any], result: Result, size: int) -> list[Any]:
        return like(self.body.state.after(carry, result.values, result.valid, size, self.rows), carry)

    def _first_pass(self, inputs: Any, carry: Any) -> Any:
        wanted = tuple(n for n, each in enumerate(inputs) if each.perturbed and _is_inexact(each.value))
        inputs, carry = [each.value for each in inputs], [each.value for each in carry]
        return self._outputs(inputs, carry), (inputs, carry, _Wanted(wanted))

    def _second_pass(self, kept: Any, cotangents: Any) -> Any:
        inputs, start, wanted = kept
        count, given = len(self.consts), cotangents[0]
        used = [n for n, each in enumerate(given) if not isinstance(each, SymbolicZero) and _is_inexact(each)]
        shared = [n for n in wanted.positions if n < count]
        own = [n - count for n in wanted.positions if n >= count]
        sums = [jnp.zeros(inputs[n].shape, _wide(inputs[n].dtype)) for n in shared]
        carry: Any = (start, sums)
        # Cotangents come by device, without the rows of micro-batches whose activations are kept.
        whole = [given[n].reshape(-1, *given[n].shape[2:]) for n in used]
        offset = sum(self.kept)
        rows: list[list[Any]] = []
        pieces = zip(stacks(inputs[count:], self.rest, self.devices, offset), stacks(whole, self.rest, self.devices))
        for (size, stacked), (_, stacked_cotangents) in pieces:

            def micro(carry: Any, entry: Any, size: int = size) -> Any:
                carry, sums = carry
                tensors, cotangents = entry

                def outputs(weights: list[Any], some: list[Any]) -> Any:
                    consts, rows = list(inputs[:count]), list(tensors)
                    for n, weight in zip(shared, weights):
                        consts[n] = weight
                    for n, tensor in zip(own, some):
                        rows[n] = tensor
                    result = self._evaluated(size, consts, carry, rows)
                    return [result.outputs[n] for n in used], result

                given = [inputs[n] for n in shared], [tensors[n] for n in own]
                _, pullback, result = jax.vjp(outputs, *given, has_aux=True)
                weights, some = pullback(cotangents)
                sums = [total + gradient.astype(total.dtype) for total, gradient in zip(sums, weights)]
                return (self._after(carry, result, size), sums), some

            carry, some = loop(micro, carry, (stacked, stacked_cotangents))
            rows.append([by_device(gradient, self.devices) for gradient in some])
        gradients: list[Any] = [None] * len(inputs)
        for n, total in zip(shared, carry[1]):
            gradients[n] = total.astype(inputs[n].dtype)
        for n, *parts in zip(own, *rows):
            tensor = inputs[count + n]
            shape = self.devices, offset, *tensor.shape[1:]
            whole_gradient = jnp.concatenate([jnp.zeros(shape, tensor.dtype), *parts], 1)
            gradients[count + n] = whole_gradient.reshape(tensor.shape)
        return gradients, None


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _wide(dtype: Any) -> Any:
    """Half precision in float32: sums of many lose what they add otherwise."""
    return jnp.promote_types(dtype, jnp.float32)
