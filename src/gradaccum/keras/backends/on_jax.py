"""Keras on JAX: `lax.scan` over stacked micro-batches, and values of variables that go in and out of functions.

An unrolled loop would hold more memory than the whole batch: XLA runs its micro-batches side by side. Where
`keras.distribution` spreads the batch over several devices, each micro-batch has rows of all of them: rows that follow
one another lie on one device, and the others would wait, or do the same again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental.sparse import BCOO
from keras import tree

from gradaccum.core.sizes import even_sizes
from gradaccum.keras import private
from gradaccum.keras.backends import base
from gradaccum.keras.backends.base import Result, Scope, Spec, assign, has_rows, values_of, wide
from gradaccum.keras.optimizer.window import Counts, Window, added_to, rescaled
from gradaccum.on_jax import scan

__all__: list[str] = []

keeps_masks = False  # on JAX plain `fit` loses them, too
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For XLA: what runs but twice takes longest to compile."""


def devices_of(rows: int) -> int:
    """How many devices a batch of so many rows is spread over, in equal parts."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    mesh = distribution.device_mesh
    count = int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])
    return count if rows % count == 0 else 1


class MicroBatches(base.MicroBatchesBase):
    """A batch in micro-batches of so many rows on each device."""

    def __init__(self, data: Any, rows: int, size: Callable[[int], int]) -> None:
        self.data, self.rows = data, rows
        self.devices = devices_of(rows)
        self.sizes = even_sizes(rows // self.devices, size(rows // self.devices))

    @property
    def count(self) -> int:
        return len(self.sizes)

    def at(self, index: int) -> tuple[Any, int]:
        rows = self.devices * self.sizes[index]
        stacked = tree.map_structure(self._stacked(index, 1), self.data)
        return self._take(rows, _first(stacked)), rows

    def run(self, micro: Any, carry: Any, specs: Any = (), threads: Any = (), begin: int = 0) -> tuple[Any, list[Any]]:
        values, outputs, start = values_of(threads), [], begin
        for size in sorted(set(self.sizes[begin:]), reverse=True):
            count = self.sizes[begin:].count(size)

            def body(state: Any, stacked: Any, size: int = size) -> Any:
                values, carry = state
                micro_batch = self._take(self.devices * size, stacked)
                with Scope(zip(threads, values)):
                    after = micro(micro_batch, self.devices * size, carry)
                    moved = values_of(threads)
                # In the dtypes of a loop's carry.
                return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), (moved, after[0]), state), after[1]

            stacks = tree.map_structure(self._stacked(start, count), self.data)
            if count > 1:
                (values, carry), kept = scan(body, (values, carry), stacks)
            else:
                (values, carry), kept = body((values, carry), _first(stacks))
                kept = jax.tree.map(lambda one: one[None], kept)
            outputs.append([self._by_device(tensor) for tensor in kept])
            start += count
        assign(threads, values)
        return carry, [jnp.concatenate(parts, 1) for parts in zip(*outputs)]

    def joined(self, parts: Sequence[Any], begin: int = 0) -> Any:
        if begin:
            zeros = jnp.zeros((self.devices, sum(self.sizes[:begin]), *parts[0].shape[2:]), parts[0].dtype)
            parts = [zeros, *parts]
        return jnp.concatenate(parts, 1).reshape(-1, *parts[0].shape[2:])

    def part(self, output: Any) -> Any:
        return self._by_device(output[None])

    def _stacked(self, number: int, count: int) -> Callable[[Any], Any]:
        """A leaf in `count` micro-batches of one size, stacked; of a sparse array, where each of them begins."""
        size, start = self.sizes[number], sum(self.sizes[:number])

        def stacked(leaf: Any) -> Any:
            if not has_rows(leaf):
                return None if leaf is None else jnp.broadcast_to(leaf, (count, *jnp.shape(leaf)))
            if isinstance(leaf, BCOO):
                return start + size * jnp.arange(count)
            rest = leaf.shape[1:]
            parts = leaf.reshape(self.devices, -1, *rest)[:, start : start + count * size]
            parts = parts.reshape(self.devices, count, size, *rest)
            return parts.swapaxes(0, 1).reshape(count, self.devices * size, *rest)

        return stacked

    def _take(self, rows: int, stacked: Any) -> Any:
        """A micro-batch of what was stacked: of a sparse array, its rows."""

        def taken(leaf: Any, part: Any) -> Any:
            if not isinstance(leaf, BCOO):
                return part
            own, size = leaf.shape[0] // self.devices, rows // self.devices
            row = leaf.indices[:, 0] % own - part
            place = leaf.indices[:, 0] // own * size + row
            return _with_rows(leaf, jnp.where((row >= 0) & (row < size), place, rows), rows)

        return tree.map_structure(taken, self.data, stacked)

    def _by_device(self, stacked: Any) -> Any:
        """Outputs of the micro-batches, stacked, as `(device, its rows, ...)`."""
        count, rest = stacked.shape[0], stacked.shape[2:]
        return stacked.reshape(count, self.devices, -1, *rest).swapaxes(0, 1).reshape(self.devices, -1, *rest)


def _first(stacks: Any) -> Any:
    return tree.map_structure(lambda leaf: None if leaf is None else leaf[0], stacks)


def _with_rows(leaf: Any, places: Any, rows: int) -> Any:
    """A sparse array whose entries are moved to other rows; those behind the last one are none."""
    indices = leaf.indices.at[:, 0].set(places.astype(leaf.indices.dtype))
    return BCOO((leaf.data, indices), shape=(rows, *leaf.shape[1:]))


def take_rows(leaf: Any, rows: Any) -> Any:
    if not isinstance(leaf, BCOO):
        return leaf[rows]
    places = jnp.full(leaf.shape[0], len(rows)).at[rows].set(jnp.arange(len(rows)))
    return _with_rows(leaf, places[leaf.indices[:, 0]], len(rows))


class GradientSum:
    """Gradients of a model's trainable variables, added up in at least 32 bits."""

    specs: tuple[Spec, ...] = ()

    def __init__(self, model: Any, overwriting: frozenset[int]) -> None:
        self.variables, self.overwriting = model.trainable_variables, overwriting
        self.moving = [*model.non_trainable_variables, *model.metrics_variables]

    def zeros(self) -> Any:
        return [jnp.zeros(value.shape, wide(value.dtype)) for value in values_of(self.variables)]

    def add(self, sums: Any, forward: Callable[[], Any], share: Any) -> Any:

        def loss(values: Any) -> Any:
            with Scope(zip(self.variables, values)):
                scaled, others = forward()
                return scaled * share, (others, values_of(self.moving))

        (_, (others, moved)), gradients = value_and_gradients(loss, values_of(self.variables))
        assign(self.moving, moved)
        joined = [jnp.maximum if index in self.overwriting else jnp.add for index in range(len(sums))]
        return [join(*pair) for join, pair in zip(joined, zip(sums, gradients))], others, []

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        return sums


class Training(base.TrainingBase):
    """What a training step leaves to JAX."""

    _gradients_of: Callable[..., Any] | None = None

    def call(self, *args: Any) -> Any:
        state, data = args
        with self._in_scope(state):
            logs = self.step.update(data)
            return logs, self.step.state()

    def _in_scope(self, state: Any) -> Scope:
        parts = self.step.variables()
        return Scope((v, value) for variables, values in zip(parts, state) for v, value in zip(variables, values))

    def build(self, data: Any) -> None:
        """Keras builds before it traces."""

    def attempt(self, data: Any, rows: Any, size: Callable[[Any], int], run: Callable[[Any, Any], Any]) -> Any:
        return run(MicroBatches(data, rows, size), GradientSum(self.step.model, self.step.overwriting))

    def look(self, function: Callable[[Any], Any], batches: Any) -> Any:
        found: list[Any] = []
        jax.eval_shape(lambda micro_batch: found.append(function(micro_batch)), batches.at(0)[0])
        return found[0]

    eagerly = staticmethod(jax.ensure_compile_time_eval)

    def compute(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        model = self.step.model
        trained, *moving = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        scaled, (loss, y_pred, *moved) = model.compute_loss_and_updates(
            values_of(trained), *map(values_of, moving), x, y, sample_weight, True, values_of(optimizer)
        )
        for variables, values in zip(moving, moved):
            assign(variables, values)
        return scaled, loss, y_pred

    def apply(self, gradients: list[Any]) -> None:
        optimizer, variables = self.step.model.optimizer, self.step.model.trainable_variables
        own = optimizer.variables
        trained, state = optimizer.stateless_apply(values_of(own), gradients, values_of(variables))
        assign([*variables, *own], [*trained, *state])

    def evaluate(self, data: Any, state: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        step = self.step
        state = step.state() if state is None else state
        if self._gradients_of is None:

            def gradients_of(state: Any, data: Any) -> tuple[Any, Any, Any]:
                with self._in_scope(state):
                    window = step.window(data)
                    return window.loss, window.gradients, step.state()[1]

            eager = step.model.run_eagerly or not step.model.jit_compile
            self._gradients_of = gradients_of if eager else jax.jit(gradients_of, compiler_options=QUICKLY)
        loss, gradients, after = self._gradients_of(state, data)
        return loss, gradients, state[1], after

    def make_train_function(self, make: Callable[[], None]) -> None:
        """Keras' own, with one thing more: an error while a step is traced leaves the model's variables as they were.

        `fit` takes the values out of the variables before the first step and puts them back after it.
        """
        model, own, proof = self.step.model, self.step, self.step.proof
        if isinstance(model.train_step, type(own)):  # not what the GradientAccumulation callback put around it
            model.train_step = copy.copy(own)  # a new one: `jax.jit` would find what was compiled for the old loss
        make()
        step: Callable[[Any, Any], Any] = model.train_function

        def guarded(state: Any, iterator: Any) -> Any:
            try:
                if proof is None or not proof.is_due(model.steps_per_execution):
                    return step(state, iterator)
                batches = [*itertools.islice(iterator, model.steps_per_execution)]
                for data in batches:
                    proof.run(data, state)
                result = step(state, iter(batches))
                proof.warn()
                return result
            except Exception:
                for variables, values in zip(own.variables(), state):
                    for variable, value in zip(variables, values):
                        if not private.has_value(variable) and not value.is_deleted():
                            private.put_value(variable, value)
                _finalize_only_after_updates(model.optimizer)
                raise

        model.train_function = guarded


def _finalize_only_after_updates(optimizer: Any) -> None:
    """After an error, Keras' `fit` still puts the averages of `use_ema` into the variables: zeros before an update."""

    def finalize(variables: Any) -> None:
        del vars(optimizer)["finalize_variable_values"]
        if int(optimizer.iterations) > 0:
            optimizer.finalize_variable_values(variables)

    if int(optimizer.iterations) == 0:
        vars(optimizer)["finalize_variable_values"] = finalize


def value_and_gradients(function: Callable[[list[Any]], Any], values: list[Any]) -> tuple[Any, list[Any]]:
    return jax.value_and_grad(function, has_aux=True)(values)


# A chunked layer.


def chunks(tensors: list[Any], micro_batch_size: int) -> MicroBatches:
    return MicroBatches(tensors, tensors[0].shape[0], lambda rows: micro_batch_size)


class Program:
    """A chunked layer's call, traced once for each size, as a function of what it closes over, such as its weights."""

    def __init__(self, body: Any, batches: MicroBatches) -> None:
        self.body, self.weights = body, list[Any]()
        sizes = sorted({batches.devices * size for size in batches.sizes})
        self._discover(sizes[-1])
        body.state.read()
        self._traced = {size: self._trace(size) for size in sizes}

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

    def _trace(self, size: int) -> tuple[Any, list[int], Any]:
        state = self.body.state

        def micro_batch(values: list[Any], tensors: list[Any]) -> Any:
            return tuple(self.body.run(tensors, zip(state.variables, values)))

        shapes = self._shapes(size)
        closed, results = jax.make_jaxpr(micro_batch, return_shape=True)(state.values(state.start()), shapes)
        return closed.jaxpr, [self._place(const) for const in closed.consts], jax.tree.structure(results)

    def _place(self, const: Any) -> int:
        for place, known in enumerate(self.weights):
            if known is const:
                return place
        self.weights.append(const)
        return len(self.weights) - 1

    def start(self) -> Any:
        return self.body.state.start()

    def evaluate(self, weights: Any, carry: list[Any], tensors: list[Any]) -> Result:
        jaxpr, places, results = self._traced[tensors[0].shape[0]]
        given = [(self.weights if weights is None else weights)[place] for place in places]
        flat = jax.core.eval_jaxpr(jaxpr, given, *self.body.state.values(carry), *tensors)
        return Result(*jax.tree.unflatten(results, flat))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which inputs need a gradient, by position: known when the first pass is traced, and needed in the second."""

    positions: tuple[int, ...]


def recomputed(passes: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
    count = len(passes.program.weights)

    def is_inexact(value: Any) -> bool:
        return jnp.issubdtype(value.dtype, jnp.inexact)

    def outputs(inputs: list[Any], carry: list[Any]) -> Any:
        return passes.first(inputs[:count], inputs[count:], carry)

    def first(inputs: Any, carry: Any) -> Any:
        wanted = tuple(n for n, each in enumerate(inputs) if each.perturbed and is_inexact(each.value))
        inputs, carry = [each.value for each in inputs], [each.value for each in carry]
        return outputs(inputs, carry), (inputs, carry, _Wanted(wanted))

    def second(kept: Any, cotangents: Any) -> Any:
        inputs, start, wanted = kept
        given = [None if isinstance(one, SymbolicZero) or not is_inexact(one) else one for one in cotangents[0]]
        return passes.second(inputs[:count], inputs[count:], start, given, wanted.positions), None

    run = jax.custom_vjp(outputs)
    run.defvjp(first, second, symbolic_zeros=True)
    return run([*passes.program.weights, *passes.body.tensors], carry)


def pullback(
    function: Callable[[list[Any]], Any], inputs: list[Any], given: list[Any], program: Any
) -> tuple[list[Any], Any]:
    _, pull, others = jax.vjp(function, inputs, has_aux=True)
    return pull(given)[0], others


def known(tensors: list[Any]) -> bool:
    return not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


at_once = jax.ensure_compile_time_eval


def compiled(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    return jax.jit(function, compiler_options=QUICKLY)


# An optimizer's window.


def accumulate(window: Window, gradients: list[Any], rows: Any) -> None:
    counts, weight, rescale, closes = window.rule.add(Counts(*window.counts.value), rows)
    sums = [
        rescaled(total.value, variable, rescale)
        if gradient is None
        else added_to(total.value, gradient, variable, weight, rescale)
        for total, gradient, variable in zip(window.sums, gradients, window.variables)
    ]
    present = jnp.asarray([gradient is not None for gradient in gradients], window.touched.dtype)
    touched = jnp.maximum(window.touched.value, present)
    _assign(window, sums, counts, touched, closes, [gradient is None for gradient in gradients])


def close(window: Window) -> None:
    _assign(window, values_of(window.sums), Counts(*window.counts.value), window.touched.value, True, [])


def _assign(window: Window, sums: Any, counts: Counts, touched: Any, closes: Any, absent: list[bool]) -> None:
    """Let the window be so, and close it if it is full. No assignment happens in a branch: branches return values."""
    inner, variables, own = window.inner, window.variables, window.inner.variables
    is_traced = isinstance(closes, jax.core.Tracer)
    if not is_traced:  # what has had no gradient in this window is known
        absent = [not one for one in np.asarray(touched).tolist()]

    def update(weights: Any, state: Any, sums: Any) -> Any:
        means = window.means(sums, counts.weight)

        def all_of_them() -> Any:
            return inner.stateless_apply(state, means, weights)

        def without_absent() -> Any:
            # Not apply(): that of a LossScaleOptimizer assigns inside of a branch.
            some = [None if none else mean for mean, none in zip(means, absent)]
            return inner.stateless_apply(state, some, weights)

        if any(absent) and is_traced:
            # Whether an earlier micro-batch of the window had a gradient for one of them is known only at run time.
            weights, state = jax.lax.cond(jnp.any(touched[np.flatnonzero(absent)] > 0), all_of_them, without_absent)
        else:
            weights, state = without_absent()
        return list(weights), list(state), [jnp.zeros_like(total) for total in sums]

    before = jnp.asarray(inner.iterations)
    values = values_of(variables), values_of(own), sums
    if is_traced:
        values = jax.lax.cond(closes, update, lambda *unchanged: unchanged, *values)
    elif closes:
        values = update(*values)
    assign([*variables, *own, *window.sums], itertools.chain(*values))
    updated = jnp.asarray(inner.iterations) != before if window.may_skip else 1
    vector = jnp.where(closes, _vector(window.rule.closed(counts, updated)), _vector(counts))
    assign([window.counts, window.touched], [vector, jnp.where(closes, 0, touched)])


def _vector(counts: Counts) -> Any:
    return jnp.stack([jnp.asarray(count, "int32") for count in counts])
